"""Candidates of text prompts: short chat, code, many languages, emoji, exact lengths, long documents."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from assay.canonical import sha256_text
from assay.samples.corpora import Function, Question, functions, messages, problems, questions
from assay.samples.ranking import Candidate
from assay.samples.recipe import ChatPart, CodePart, EmojiPart, LongPart, MultilingualPart, RaggedPart
from assay.samples.sizing import Sizer

Sources = dict[str, Path]  # source -> its directory
Builder = Callable[[Any, Sources, Sizer], Iterator[Candidate]]

_STEM_CHARS = 400  # of a question that still counts as short
_FUNCTION_CHARS = 1200

_SYSTEM = (
    "You are a patient teacher. Answer in one short paragraph.",
    "You are a terse assistant. Use at most two sentences.",
    "You answer as a numbered list of at most three points.",
)

# locale -> (script tag, language in English, "Explain the next sentence in simple words:" in that language)
_LANGUAGES = {
    "zh_Hans": ("cjk", "Chinese", "请用简单的话解释下面这句话的意思："),
    "ja": ("cjk", "Japanese", "次の文の意味をわかりやすく説明してください。"),
    "ko": ("cjk", "Korean", "다음 문장의 뜻을 쉬운 말로 설명해 주세요."),
    "ar": ("rtl", "Arabic", "اشرح معنى الجملة التالية بكلمات بسيطة:"),
    "he": ("rtl", "Hebrew", "הסבר במילים פשוטות את המשפט הבא:"),
    "fa": ("rtl", "Persian", "معنی جملهٔ زیر را به زبان ساده توضیح بده:"),
    "hi": ("indic", "Hindi", "नीचे दिए गए वाक्य का अर्थ सरल शब्दों में समझाइए:"),
    "th": ("thai", "Thai", "ช่วยอธิบายความหมายของประโยคต่อไปนี้ด้วยคำง่าย ๆ"),
    "ru": ("cyrillic", "Russian", "Объясни простыми словами, что значит это предложение:"),
    "el": ("greek", "Greek", "Εξήγησε με απλά λόγια την παρακάτω πρόταση:"),
}

# Runs of code points whose pictures are harmless: animals, food, nature, music, vehicles.
_EMOJI = [(0x1F400, 0x1F43C), (0x1F980, 0x1F9A2), (0x1F32D, 0x1F344), (0x1F347, 0x1F350), (0x1F30D, 0x1F320)]
_EMOJI += [(0x1F3B7, 0x1F3BB), (0x1F680, 0x1F69A)]
# One of each way in which several code points make one picture.
_SEQUENCES = ["👩‍🚀", "👨🏽‍🌾", "🏴‍☠️", "🇯🇵", "4️⃣", "👍🏿", "👨‍👩‍👧‍👦", "❤️"]

_LONG_QUESTIONS = {
    "history": (
        "What is the main argument of the first text? Answer in two sentences.",
        "Which of these texts is the oldest, and how can you tell?",
        "Pick one sentence from the texts and explain it in your own words.",
    ),
    "exam": (
        "Which of these questions is the hardest, and why?",
        "Say in one sentence what the first answer says.",
        "Write one more question of the same kind.",
    ),
    "code": (
        "Which of these functions would you use to split a sequence into pieces, and why?",
        "Write a short example that calls the first function.",
        "Which of these functions return an iterator? Name two of them.",
    ),
}


def _user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


# --- chat ---------------------------------------------------------------------------------------------------------


def chat(part: ChatPart, sources: Sources, sizer: Sizer) -> Iterator[Candidate]:
    """Short questions in the styles asked for, one candidate per question and style that suits it."""
    pool = [item for item in questions(sources["lm_eval"]) if len(item.stem) <= _STEM_CHARS]
    for style in part.styles:
        if style == "problem":
            yield from _problems(sources["lm_eval"])
        else:
            yield from chain.from_iterable(_chat_candidate(style, item, pool) for item in pool)


def _problems(directory: Path) -> Iterator[Candidate]:
    for index, text in enumerate(problems(directory), 1):
        request = _user(f"{text} Think step by step.")
        tags = ("style:problem",)
        yield Candidate(f"problem-{index}", "chat", request, f"lm_eval:gsm8k/{index}", "problem", tags=tags)


def _chat_candidate(style: str, item: Question, pool: list[Question]) -> Iterator[Candidate]:
    request = _STYLES[style](item, pool)
    if request is not None:
        yield Candidate(
            key=f"{style}-{item.key}",
            kind="chat",
            request=request,
            source=f"lm_eval:mmlu/{item.key}",
            stratum=style,
            tags=(f"style:{style}",),
        )


def _stands_alone(stem: str) -> bool:
    """Whether a question makes sense without its options."""
    leaning = r"following|of these|which (one|statement|expression|element|position)|except|not a |___|\bbelow\b"
    return stem.endswith("?") and not re.search(leaning, stem, re.IGNORECASE)


def _open(item: Question, _: list[Question]) -> dict[str, Any] | None:
    return _user(item.stem) if _stands_alone(item.stem) else None


def _choice(item: Question, _: list[Question]) -> dict[str, Any]:
    options = re.sub(r" (?=\([B-Z]\) )", "\n", item.options)
    return _user(f"{item.stem}\n{options}\nWhich option is right? Give its letter and a short reason.")


def _system(item: Question, _: list[Question]) -> dict[str, Any] | None:
    if not _stands_alone(item.stem):
        return None
    prompt = _SYSTEM[int(sha256_text(item.key), 16) % len(_SYSTEM)]
    return {"messages": [{"role": "system", "content": prompt}, {"role": "user", "content": item.stem}]}


def _dialogue(item: Question, pool: list[Question]) -> dict[str, Any] | None:
    """The question before it in the same subject, that one's worked answer, and then the question itself."""
    before = next((one for one, two in pairwise(pool) if two is item and one.subject == item.subject), None)
    if before is None or len(before.answer) > _STEM_CHARS:
        return None
    turns = [("user", f"{before.stem}\n{before.options}"), ("assistant", before.answer)]
    turns.append(("user", f"Thanks. And this one? {item.stem}\n{item.options}"))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


_STYLES: dict[str, Callable[[Question, list[Question]], dict[str, Any] | None]] = {
    "open": _open,
    "choice": _choice,
    "system": _system,
    "dialogue": _dialogue,
}


# --- code ---------------------------------------------------------------------------------------------------------


def code(part: CodePart, sources: Sources, sizer: Sizer) -> Iterator[Candidate]:
    """Functions to explain, to write from their summary, or to go on with after their docstring."""
    requests: dict[str, Callable[[Function], dict[str, Any]]] = {
        "explain": lambda it: _user(f"What does this Python function do?\n\n```python\n{it.source}\n```"),
        "write": lambda it: _user(f"Write a Python function `{it.name}`. It should do this: {it.summary}"),
        "complete": lambda it: {"prompt": f"{it.head}\n"},
    }
    for style in part.styles:
        for item in functions(sources["more_itertools"]):
            if len(item.source) <= _FUNCTION_CHARS:
                yield Candidate(
                    key=f"{style}-{item.name}",
                    kind="completion" if style == "complete" else "chat",
                    request=requests[style](item),
                    source=f"more_itertools:{item.module}.{item.name}",
                    stratum=style,
                    tags=(f"style:{style}",),
                )


# --- languages and emoji ------------------------------------------------------------------------------------------


def multilingual(part: MultilingualPart, sources: Sources, sizer: Sizer) -> Iterator[Candidate]:
    """Sentences to explain in their own language or to translate into English, by turns of a hash."""
    for locale in part.languages:
        script, language, explain = _LANGUAGES[locale]
        for message in messages(sources["django"], locale):
            digest = sha256_text(message.english)
            requests = (
                f"{explain}\n\n{message.text}",
                f"Translate this {language} sentence into English: {message.text}",
            )
            yield Candidate(
                key=f"{locale.lower()}-{digest[:8]}",
                kind="chat",
                request=_user(requests[int(digest, 16) % len(requests)]),
                source=f"django:{locale}/{message.english[:60]}",
                stratum=locale,
                tags=(f"language:{locale}", script),
            )


def emoji(part: EmojiPart, sources: Sources, sizer: Sizer) -> Iterator[Candidate]:
    """A short story to tell from three emoji: neighbours in Unicode, and one made of several code points."""
    for start, end in _EMOJI:
        for code_point in range(start, end - 1, 2):
            plain = f"{chr(code_point)}{chr(code_point + 1)}"
            name = unicodedata.name(chr(code_point)).lower()
            joined = _SEQUENCES[int(sha256_text(plain), 16) % len(_SEQUENCES)]
            yield Candidate(
                key=f"{code_point:x}",
                kind="chat",
                request=_user(f"Tell a two-sentence story with these emoji: {plain}{joined}. Start with the {name}."),
                source=f"unicode:U+{code_point:X}",
            )


# --- exact lengths and long documents -----------------------------------------------------------------------------


def ragged(part: RaggedPart, sources: Sources, sizer: Sizer) -> Iterator[Candidate]:
    """Historical texts cut to exactly as many tokens as asked, to be continued."""
    documents = _documents(_passages(sources))
    for length in part.lengths:
        for name, text in documents:
            start = sizer.cut(text, length)
            if start is not None:
                yield Candidate(
                    key=f"{length:04}-{name}",
                    kind="completion",
                    request={"prompt": start},
                    source=f"lm_eval:mmlu/{name}",
                    stratum=str(length),
                    tags=(f"length:{length}",),
                )


def long(part: LongPart, sources: Sources, sizer: Sizer) -> Iterator[Candidate]:
    """A document of several texts, as long as the part allows, and a question about it.

    The strata are the questions, asked in turn, and a group is a document: consecutive items share their documents.
    """
    asked = chain.from_iterable(_LONG_QUESTIONS.values())
    room = part.tokens - max(sizer.count(_user(f"\n\n{question}")) for question in asked) - 4  # joins cost a few
    corpora = {
        "history": ("lm_eval:mmlu", _fitting(_passages(sources), room, sizer)),
        "exam": ("lm_eval:mmlu", _fitting(_worked(sources), room, sizer)),
        "code": ("more_itertools", _fitting(_functions(sources), room, sizer)),
    }
    for turn in range(3):
        for corpus, (origin, documents) in corpora.items():
            for name, text in documents:
                yield Candidate(
                    key=f"{corpus}-{name}-q{turn + 1}",
                    kind="chat",
                    request=_user(f"{text}\n\n{_LONG_QUESTIONS[corpus][turn]}"),
                    source=f"{origin}/{name}",
                    stratum=f"{corpus} {turn}",
                    group=f"{corpus} {name}",
                    tags=(f"document:{corpus}-{name}",),
                )


def _passages(sources: Sources) -> list[tuple[str, str]]:
    return [(item.key, item.passage) for item in questions(sources["lm_eval"]) if item.passage]


def _worked(sources: Sources) -> list[tuple[str, str]]:
    items = [item for item in questions(sources["lm_eval"]) if not item.passage]
    return [(item.key, f"Q: {item.stem}\n{item.options}\nA: {item.answer}") for item in items]


def _functions(sources: Sources) -> list[tuple[str, str]]:
    return [(item.name, item.source) for item in functions(sources["more_itertools"])]


def _documents(texts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One document per text: that text and all that follow it, from the first again after the last."""
    bodies = [body for _, body in texts]
    return [(name, "\n\n\n".join(bodies[index:] + bodies[:index])) for index, (name, _) in enumerate(texts)]


def _fitting(texts: list[tuple[str, str]], tokens: int, sizer: Sizer) -> list[tuple[str, str]]:
    """Documents cut between words to at most `tokens` tokens; those that do not reach that far are left out."""
    cut = ((name, text, sizer.start(text, tokens)) for name, text in _documents(texts))
    return [(name, f"{start.rsplit(None, 1)[0]} …") for name, text, start in cut if start != text]


BUILDERS: dict[str, Builder] = {
    "chat": chat,
    "code": code,
    "multilingual": multilingual,
    "emoji": emoji,
    "ragged": ragged,
    "long": long,
}
