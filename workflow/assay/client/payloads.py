"""What an OpenAI-style answer says: whole bodies and stream chunks, chat and completions, read into one `Answer`.

Token ids are taken from `token_ids`/`prompt_token_ids` (vLLM and servers like it), or from token strings of the form
"token_id:123" where the client asked for those. Any other token string names no token: different ids decode to the
same string.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from assay.client.answers import (
    MAX_ID,
    BadAnswer,
    check_unicode,
    error_message,
    excerpt,
    finite,
    ids_or_none,
    malformed,
    typed,
)
from assay.records import Evidence, ResponseStatus

MIN_TOP_K = 5  # of evidence level E0
_TOKEN_ID = re.compile(r"token_id:(\d+)")


@dataclass
class Answer:
    """One answer, filled payload by payload with `absorb`. Logprobs in nat."""

    ids_in_strings: bool
    text: str = ""
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    named_ids: list[int | None] = field(default_factory=list)  # from "token_id:123", one per logprob entry
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int | None, float]]] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    def absorb(self, payload: Any) -> bool:
        """Take in a whole body or one stream chunk; return whether it brought any output.

        Raises:
            BadAnswer: it carries an error, a number that is not finite, or is not what the protocol says.
        """
        body = typed(payload, dict, "the answer")
        if error := error_message(body):
            raise BadAnswer(ResponseStatus.STREAM_ERROR, error)
        self._absorb_usage(body.get("usage"))
        self._absorb_prompt_ids(body.get("prompt_token_ids"))
        choices = typed(body.get("choices"), list, "choices")
        brought = [self._absorb_choice(typed(choice, dict, "choices[]")) for choice in choices]
        return any(brought)

    def _absorb_choice(self, choice: dict[str, Any]) -> bool:
        if choice.get("index", 0) != 0:
            raise malformed(f"choice {choice['index']!r} was never asked for")
        self._absorb_prompt_ids(choice.get("prompt_token_ids"))
        text, ids, steps = (
            _text(choice),
            ids_or_none(choice.get("token_ids"), "token_ids"),
            _steps(choice.get("logprobs")),
        )
        self.text += text
        if ids is not None:
            self.token_ids = (self.token_ids or []) + ids
        for token, logprob, top in steps:
            self.named_ids.append(self._named_id(token))
            self.logprobs.append(finite(logprob, f"logprob of token {len(self.logprobs)}"))
            where = f"top logprob of token {len(self.tops)}"
            self.tops.append([(self._named_id(name), finite(value, where)) for name, value in top])
        finish = choice.get("finish_reason")
        if finish is not None:
            self.finish_reason = typed(finish, str, "finish_reason")
        if finish in ("error", "abort"):
            raise BadAnswer(ResponseStatus.STREAM_ERROR, f"the server ended the answer with finish_reason '{finish}'")
        return bool(text or ids or steps)

    def _absorb_usage(self, usage: Any) -> None:
        if usage is not None:
            usage = typed(usage, dict, "usage")
            prompt = _count(usage.get("prompt_tokens"), "usage.prompt_tokens")
            output = _count(usage.get("completion_tokens"), "usage.completion_tokens")
            if prompt or output:  # a server that writes 0 for both did not count (mstar 6666c623)
                self.prompt_tokens, self.output_tokens = prompt, output

    def _absorb_prompt_ids(self, value: Any) -> None:
        ids = ids_or_none(value, "prompt_token_ids")
        if ids is not None:
            self.prompt_token_ids = ids

    def _named_id(self, token: Any) -> int | None:
        match = _TOKEN_ID.fullmatch(token) if self.ids_in_strings and isinstance(token, str) else None
        if match is None:
            return None
        if len(match[1]) > len(str(MAX_ID)) or int(match[1]) > MAX_ID:
            raise malformed(f"{excerpt(token)!r} names no token id: the largest is {MAX_ID}")
        return int(match[1])

    def row(self, top_k: int) -> dict[str, Any]:
        """The columns of a `responses` row that the answer decides; top lists are cut to `top_k`, descending.

        A server may list the chosen token beside its top-k, so an entry need not have the rank of its place.

        Raises:
            BadAnswer: the answer is empty, or contradicts itself.
        """
        check_unicode(self.text)
        ids = self._sampled_ids()
        # An immediate end of turn is an answer: no text, but a token was sampled.
        if not self.text and not ids and not self.output_tokens:
            raise BadAnswer(
                ResponseStatus.EMPTY,
                "HTTP 200 with neither text nor tokens",
                finish_reason=self.finish_reason,
                prompt_tokens=self.prompt_tokens,  # tells a wrong template even so
                output_tokens=self.output_tokens,
            )
        tops = self._top_lists(top_k)
        return {
            "finish_reason": self.finish_reason,
            "evidence": self._evidence(ids, tops),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "text": self.text,
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": ids,
            "token_logprobs": self.logprobs or None,
            "top_token_ids": tops and [[token for token, _ in top] for top in tops],
            "top_logprobs": tops and [[value for _, value in top] for top in tops],
        }

    def _sampled_ids(self) -> list[int] | None:
        named = [token for token in self.named_ids if token is not None]
        if self.token_ids is None:
            return named if named and len(named) == len(self.named_ids) else None
        if self.logprobs and len(self.logprobs) != len(self.token_ids):
            raise malformed(f"{len(self.token_ids)} token_ids but {len(self.logprobs)} logprobs")
        if named and named != self.token_ids:
            raise malformed("token_ids and logprobs name different tokens")
        return self.token_ids

    def _top_lists(self, top_k: int) -> list[list[tuple[int, float]]] | None:
        tops = [[(token, value) for token, value in top if token is not None] for top in self.tops]
        if not tops or any(len(kept) < len(top) or not top for kept, top in zip(tops, self.tops, strict=True)):
            return None
        return [sorted(top, key=lambda entry: -entry[1])[:top_k] for top in tops]

    def _evidence(self, ids: list[int] | None, tops: list[list[tuple[int, float]]] | None) -> Evidence:
        if self.finish_reason is None:
            return Evidence.E3
        if not ids:
            return Evidence.E2
        full = self.prompt_token_ids and tops and min(map(len, tops)) >= MIN_TOP_K
        return Evidence.E0 if full else Evidence.E1


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        text = choice["text"]
    else:
        holder = choice.get("message", choice.get("delta"))
        text = typed(holder, dict, "message").get("content")
    return "" if text is None else typed(text, str, "the text")


def _count(value: Any, what: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ID:
        raise malformed(f"{what} should be a count, found {value!r}")
    return value


Step = tuple[Any, Any, list[tuple[Any, Any]]]  # token, logprob, [(token, logprob)]


def _steps(logprobs: Any) -> list[Step]:
    if logprobs is None:
        return []
    logprobs = typed(logprobs, dict, "logprobs")
    return _chat_steps(logprobs["content"]) if "content" in logprobs else _completion_steps(logprobs)


def _chat_steps(content: Any) -> list[Step]:
    entries = [typed(entry, dict, "logprobs.content[]") for entry in typed(content or [], list, "logprobs.content")]
    return [(entry.get("token"), entry.get("logprob"), _chat_top(entry)) for entry in entries]


def _chat_top(entry: dict[str, Any]) -> list[tuple[Any, Any]]:
    tops = [typed(top, dict, "top_logprobs[]") for top in typed(entry.get("top_logprobs") or [], list, "top_logprobs")]
    return [(top.get("token"), top.get("logprob")) for top in tops]


def _completion_steps(logprobs: dict[str, Any]) -> list[Step]:
    tokens = typed(logprobs.get("tokens"), list, "logprobs.tokens")
    values = typed(logprobs.get("token_logprobs"), list, "logprobs.token_logprobs")
    tops = typed(logprobs.get("top_logprobs") or [{}] * len(tokens), list, "logprobs.top_logprobs")
    if not len(tokens) == len(values) == len(tops):
        raise malformed(f"{len(tokens)} tokens, {len(values)} token_logprobs and {len(tops)} top_logprobs")
    tops = [list(typed(top or {}, dict, "top_logprobs[]").items()) for top in tops]
    return list(zip(tokens, values, tops, strict=True))
