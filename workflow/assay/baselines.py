"""What the rules of other projects say of the very same outputs: beside which the fault matrix shows our verdicts.

Rules on a rate have no limit of their own in public, or one that the reference itself would not keep. Here they fail
where the server is worse than the reference by `RATE`, which is more than they promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.metrics import speech
from assay.metrics.text import check_logprobs_close, rouge_l
from assay.records import ResponseStatus

TOP_N = 5  # of vLLM's rule
ROUGE_L_TOLERANCE = 0.95  # mean over items, below which a ROUGE-L gate is taken to fail
RATE = 0.01  # word error rate above the reference's at which a gate on a mean is taken to fail
LENGTHS = (0.9, 1.1)  # mean length over the reference's that a gate on length takes for right

Rows = Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """What one rule says of a run; `passes` is None where it has nothing to go by."""

    rule: str
    passes: bool | None
    value: str = ""

    def __str__(self) -> str:
        if self.passes is None:
            return "–"
        return f"{'pass' if self.passes else 'FAIL'} {f'({self.value})' if self.value else ''}".strip()


# --- text --------------------------------------------------------------------------------------------------------


def text_rules(pairs: Sequence[tuple[Rows, Rows]]) -> list[Said]:
    """Exact match, vLLM's `check_logprobs_close` and ROUGE-L of (served, reference) responses."""
    same = [_same(*pair) for pair in pairs]
    close = [said for pair in pairs if (said := _close(*pair)) is not None]
    rouge = [rouge_l(*((row["text"] or "").split() for row in reversed(pair))) for pair in pairs]
    mean = sum(rouge) / len(rouge) if rouge else None
    return [
        Said("exact match", all(same) if same else None, f"{sum(same)}/{len(same)}"),
        Said("top-5", all(close) if close else None),
        Said("ROUGE-L", None) if mean is None else Said("ROUGE-L", mean >= ROUGE_L_TOLERANCE, f"{mean:.3f}"),
    ]


def _same(served: Rows, judge: Rows) -> bool:
    if served["status"] != ResponseStatus.OK:
        return False
    if served["token_ids"] is not None:
        return bool(served["token_ids"] == judge["token_ids"])
    return bool(served["text"] == judge["text"])


def _close(served: Rows, judge: Rows) -> bool | None:
    if served["status"] != ResponseStatus.OK:
        return False
    if not served["top_token_ids"]:
        return None
    top = [[ids[:TOP_N] for ids in row["top_token_ids"]] for row in (judge, served)]
    return check_logprobs_close(judge["token_ids"], top[0], served["token_ids"], top[1])


# --- words -------------------------------------------------------------------------------------------------------

Heard = Mapping[str, str | None]  # item -> transcript; None: there is none


def mean_wer(texts: Mapping[str, str], served: Heard, reference: Heard, normaliser: str) -> Said:
    """The mean of the items' word error rates, over the items that have a transcript at all."""
    call = speech.normaliser(normaliser).call

    def mean(heard: Heard) -> float | None:
        pairs = ((texts[item], text) for item, text in heard.items() if text is not None and texts[item])
        return speech.macro_rate(speech.align_words(call(asked), call(text)).edits for asked, text in pairs)

    return _rate("mean WER", mean, served, reference)


def seed_tts_eval(texts: Mapping[str, str], served: Heard, reference: Heard) -> Said:
    """The rule of github.com/BytedanceSpeech/seed-tts-eval, English."""
    return _rate("seed-tts-eval", lambda heard: speech.seed_tts_eval_wer(texts, heard), served, reference)


def _rate(rule: str, rate: Callable[[Heard], float | None], served: Heard, reference: Heard) -> Said:
    own, other = rate(served), rate(reference)
    if own is None or other is None:
        return Said(rule, None)
    return Said(rule, own - other <= RATE, f"{own:.1%}, reference {other:.1%}")


def lengths_alone(served: Iterable[Rows], reference: Mapping[str, Rows]) -> Said:
    """Mean length over the reference's, of the audio that can be read."""
    ratios = [
        row["duration_s"] / reference[row["item_id"]]["duration_s"]
        for row in served
        if row["duration_s"] and reference[row["item_id"]]["duration_s"]
    ]
    if not ratios:
        return Said("length", None)
    mean = sum(ratios) / len(ratios)
    return Said("length", LENGTHS[0] <= mean <= LENGTHS[1], f"{mean:.2f}")


def speech_rules(texts: Mapping[str, str], served: Sequence[Rows], reference: Sequence[Rows]) -> list[Said]:
    """Mean WER, length alone and seed-tts-eval of transcripts of served and reference speech."""
    own, other = ({row["item_id"]: row["text"] for row in rows} for rows in (served, reference))
    return [
        mean_wer(texts, own, other, "whisper_english"),
        lengths_alone(served, {row["item_id"]: row for row in reference}),
        seed_tts_eval(texts, own, other),
    ]


def transcription_rules(texts: Mapping[str, str], served: Sequence[Rows], reference: Sequence[Rows]) -> list[Said]:
    """Mean WER of transcripts that a server and the reference gave, over the answers that came."""
    own, other = (
        {row["item_id"]: row["text"] if row["status"] == ResponseStatus.OK else None for row in rows}
        for rows in (served, reference)
    )
    return [mean_wer(texts, own, other, "whisper_english")]
