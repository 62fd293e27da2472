"""Metric vectors (`metric-cases/1`) run against the library: one result a case.

A case's metric may carry a suffix that names its trap (`needle_substring_trap`): the adapter of the longest known stem
runs it. An adapter is the shortest call of the library that answers the case; it contains no mathematics of its own.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from scipy import special

from assay import store
from assay.config import TextGates
from assay.errors import StoreError
from assay.media.audio import Container, decode, encode_wav
from assay.metrics import audio, speech, stats, text
from assay.records import JUDGE, SCORES, FailureKind, Status
from assay.verdicts.decide import decide
from assay.verdicts.drafts import noninferiority, settle
from assay.verdicts.evidence import reference_problems
from assay.verdicts.margins.exceedance import hard_gate, item_claim
from assay.verdicts.margins.floor import cut_floor
from assay.verdicts.model import Cleanup, Coverage, Gate, Instance, Startup, StartupFailure, Unscored
from assay.verdicts.scoretable import ScoreTable
from assay.verdicts.suite import GateJudge
from assay.verdicts.text.structure import TextTrial, structure_gate

Input = Mapping[str, Any]
Adapter = Callable[[Input], Any]
FORMAT = "metric-cases/1"


class _NotGiven(Exception):
    """A case's input lacks what its metric needs."""


class _Given(dict[str, Any]):
    """A JSON object of a case's input: what it lacks is told from what the library fails to find."""

    def __missing__(self, key: str) -> Any:
        raise _NotGiven(key)


@dataclass(frozen=True)
class CaseResult:
    """What one case gave."""

    id: str
    outcome: Literal["ok", "WRONG", "not covered"]
    got: Any = None
    expected: Any = None
    note: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the library gave another value than expected."""
        return self.outcome == "WRONG"

    def __str__(self) -> str:
        if self.outcome == "WRONG":
            return f"{self.id} WRONG got {self.got} / expected {self.expected}"
        return f"{self.id} {self.outcome}" + (f" ({self.note})" if self.note else "")


def run_cases(path: str | Path) -> list[CaseResult]:
    """Run every case of a file.

    Raises:
        StoreError: the file cannot be read, or is not in this format.
    """
    content = store.read_json(path)
    if not isinstance(content, dict) or content.get("schema") != FORMAT or not isinstance(content.get("cases"), list):
        raise StoreError(f"{path} is not a metric case file: `schema` must be '{FORMAT}' and `cases` a list")
    if not content["cases"]:
        raise StoreError(f"{path} holds no case: nothing would be checked")
    return [run_case(case, str(path)) for case in content["cases"]]


def run_case(case: Any, where: str) -> CaseResult:
    """Run one case. Numbers agree when they differ by at most the case's `tol`."""
    lacking = {"id", "metric", "input", "expected", "tol"} - set(case if isinstance(case, dict) else ())
    if lacking:
        raise StoreError(f"{where}: a case lacks {', '.join(sorted(lacking))}: {str(case)[:80]}")
    for key, kind in (("metric", str), ("input", dict), ("tol", int | float)):
        if not isinstance(case[key], kind):
            raise StoreError(
                f"{where}: case {case['id']}: `{key}` has a value of the wrong kind: {str(case[key])[:80]}"
            )
    stem = max((name for name in ADAPTERS if case["metric"].startswith(name)), key=len, default=None)
    if stem is None:
        return CaseResult(case["id"], "not covered", note=case["metric"])
    expected = _decode(case["expected"])
    try:
        got = _plain(ADAPTERS[stem](_decode(case["input"])))
    except _NotGiven as error:
        return CaseResult(case["id"], "not covered", note=f"{case['metric']} without input '{error}'")
    except Exception as error:
        return CaseResult(case["id"], "WRONG", f"{type(error).__name__}: {error}", expected)
    agrees = _agree(got, expected, float(case["tol"]))
    return CaseResult(case["id"], "ok" if agrees else "WRONG", got, expected)


def _decode(value: Any) -> Any:
    """JSON with the strings 'inf', '-inf' and 'nan' as the numbers they stand for."""
    if isinstance(value, dict):
        return _Given((key, _decode(entry)) for key, entry in value.items())
    if isinstance(value, list):
        return [_decode(entry) for entry in value]
    return float(value) if value in ("inf", "-inf", "nan") else value


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _agree(got: Any, expected: Any, tol: float) -> bool:
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(_agree(got[key], expected[key], tol) for key in expected)
        )
    if isinstance(expected, list):
        return (
            isinstance(got, list)
            and len(got) == len(expected)
            and all(_agree(left, right, tol) for left, right in zip(got, expected, strict=True))
        )
    if isinstance(expected, bool | int | float) and isinstance(got, bool | int | float):
        if math.isfinite(expected) and math.isfinite(got):
            return abs(got - expected) <= tol
        return got == expected or (math.isnan(got) and math.isnan(expected))
    return bool(got == expected)


# --- text --------------------------------------------------------------------------------------------------------


def _greedy_margin(case: Input) -> Any:
    logprobs = {int(token): value for token, value in case["ref_logprobs"].items()}
    return text.greedy_margin(max(logprobs.values()), logprobs[case["served"]])


def _censored_margin(case: Input) -> Any:
    margin = text.topk_margin({int(token): value for token, value in case["ref_topk"].items()}, case["served"])
    return {"margin_lower_bound": margin.bound, "censored": margin.censored}


def _flips(case: Input) -> Any:
    found = text.flips(case["base_correct"], case["new_correct"])
    return {"acc_base": found.base, "acc_new": found.new, "flip_rate": found.rate}


def _canonical(case: Input) -> Any:
    from tokenizers import Tokenizer, models

    merges = [tuple(pair) for pair in case["vocab_merges"]]
    pieces = dict.fromkeys([*(piece for pair in merges for piece in pair), *("".join(pair) for pair in merges)])
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    names = {number: piece for piece, number in vocabulary.items()}
    ids = [vocabulary[piece] for piece in case["served_tokens"]]
    return {
        "canonical": text.is_canonical(
            ids, lambda tokens: "".join(names[token] for token in tokens), lambda string: tokenizer.encode(string).ids
        )
    }


def _utf8(case: Input) -> Any:
    parts = [bytes(part) for part in case["bytes"]]
    return {"decoded_each": [text.decode_bytes([part]) for part in parts], "joined": text.decode_bytes(parts)}


def _after_eos(case: Input) -> Any:
    count = text.tokens_after_eos(case["ids"], case["eos"])
    return {"tokens_after_eos": count, "violates_stop": count > 0}


def _clipped_mean(case: Input) -> Any:
    margins = np.array(case["margins"], np.float64)
    return text.clipped_mean(margins, np.array([0, len(margins)]), case["clip"])[0]


def _without_rest(case: Input) -> Any:
    """What dropping the rest bucket would give: the number that `text.kl_topk` must not return."""
    return special.rel_entr(case["p_topk"], case["q_topk"]).sum()


TEXT: dict[str, Adapter] = {
    "log_softmax": lambda case: text.log_softmax(case["logits"]),
    "greedy_margin": _greedy_margin,
    "greedy_margin_censored": _censored_margin,
    "kl_divergence": lambda case: text.kl_divergence(case["p"], case["q"]),
    "kl_topk": lambda case: text.kl_topk(np.log(case["p_topk"]), np.log(case["q_topk"])),
    "kl_topk_dropped_rest_WRONG": _without_rest,
    "perplexity": lambda case: text.perplexity(case["logprobs"]),
    "flips": _flips,
    "first_divergence": lambda case: text.first_divergence(case["a"], case["b"]),
    "gumbel_margin": lambda case: text.gumbel_margin(
        case["logits"], case["temperature"], case["gumbel"], case["served"]
    ),
    "bf16_rounding": lambda case: text.round_bf16(case["x"]),
    "needle": lambda case: text.needle_correct(case["expected"], case["answer"]),
    "tool_call_f1": lambda case: text.tool_call_f1(case["tp"], case["fp"], case["fn"]),
    "retokenization": _canonical,
    "utf8_split_tokens": _utf8,
    "tail_tokens_after_eos": _after_eos,
    "length_ratio": lambda case: text.length_ratio(case["served_len"], case["ref_len"]),
    "clipped_mean_margin": _clipped_mean,
    "mmd2_hamming": lambda case: text.mmd2_hamming(case["x"], case["y"]),
}


# --- stats -------------------------------------------------------------------------------------------------------


def _interval(case: Input) -> Any:
    bounds = stats.clopper_pearson(case["k"], case["n"], 1 - case["alpha"], "two")
    return [bounds.low, bounds.high]


def _tolerance_limit(case: Input) -> Any:
    rank = 1 if case["order"] == "max" else int(case["order"][0])  # "max", "2nd largest", ...
    return stats.tolerance_limit_n(case["quantile"], case["confidence"], rank)


STATS: dict[str, Adapter] = {
    "clopper_pearson_upper_one_sided": lambda case: (
        stats.clopper_pearson(case["k"], case["n"], case["confidence"]).high
    ),
    "clopper_pearson_two_sided": _interval,
    "n_for_zero_failures": lambda case: stats.n_for_zero_failures(case["max_rate"], case["confidence"]),
    "tolerance_limit_n": _tolerance_limit,
    "conditional_exceedance_p": lambda case: stats.conditional_exceedance(
        case["k_served"], case["n_served"], case["k_floor"], case["n_floor"]
    ),
    "holm_adjust": lambda case: stats.holm(case["p"]),
    "worst_of_J_plus_1": lambda case: stats.worst_of_j_plus_1(case["items"], case["worst_count"], case["J"]),
    "sign_test_one_sided": lambda case: stats.sign_test(case["neg"], case["n"]),
    "hodges_lehmann": lambda case: stats.hodges_lehmann(case["d"]),
    "floor_quantile": lambda case: stats.floor_quantile(
        case["x"], case["q"], "lower" if case["method"] == "lower" else "upper"
    ),
    "sign_flip_permutation_min_p": lambda case: stats.sign_flip_least_p(case["n_items"]),
}


# --- speech ------------------------------------------------------------------------------------------------------


def _word_edits(case: Input) -> speech.Edits:
    return speech.align_words(case["ref"], case["hyp"]).edits


def _wer(case: Input) -> Any:
    """The rate; the count of errors against an empty reference, which has none."""
    edits = _word_edits(case)
    return edits.errors if edits.rate is None else edits.rate


def _corpus_and_macro(case: Input) -> Any:
    keys = [str(number) for number in range(len(case["refs"]))]
    aligned = speech.align_all(dict(zip(keys, case["refs"], strict=True)), dict(zip(keys, case["hyps"], strict=True)))
    edits = [alignment.edits for alignment in aligned.values()]
    return {"corpus": speech.pool(edits).rate, "macro": speech.macro_rate(edits)}


def _cer(reference: str, hypothesis: str) -> float | None:
    return speech.align_characters(reference, hypothesis).edits.rate


def _composed(case: Input) -> Any:
    """Both texts are given as "text (form)": in the Unicode form that is named."""
    forms = (case[key].removesuffix(")").split(" (") for key in ("ref", "hyp"))
    reference, hypothesis = (unicodedata.normalize(form, string) for string, form in forms)
    nfc = speech.normaliser("nfc").call
    return {"raw": _cer(reference, hypothesis), "after_nfc": _cer(nfc(reference), nfc(hypothesis))}


def _error_rates(case: Input) -> Any:
    edits = _word_edits(case)
    return {"wer": edits.rate, "mer": edits.mer, "wil": edits.wil, "wip": edits.wip}


def _normalised(name: str) -> Adapter:
    return lambda case: speech.normaliser(name).call(case["text"])


def _repeats(case: Input) -> Any:
    """The text is given as "'words ' xN": said N times."""
    words, times = case["text"].removeprefix("'").split("' x")
    return speech.repeat_fraction(words * int(times))


SPEECH: dict[str, Adapter] = {
    "wer": _wer,
    "wer_corpus_vs_macro": _corpus_and_macro,
    "cer": lambda case: _cer(case["ref"], case["hyp"]),
    "cer_nfc_nfd": _composed,
    "mer_wil_wip": _error_rates,
    "english_normalizer": _normalised("whisper_english"),
    "basic_normalizer": _normalised("whisper_basic"),
    "basic_normalizer_zh_split": _normalised("whisper_basic_letters"),
    "repeat_trigram_fraction": _repeats,
}


# --- audio -------------------------------------------------------------------------------------------------------


def _tone(hertz: float, amplitude: float, samples: int, rate: int) -> audio.Samples:
    return amplitude * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)


def _rms_dbfs(case: Input) -> Any:
    """The signal is a list, or words that name an amplitude: one second of 1 kHz at 24 kHz."""
    signal = case["signal"]
    if isinstance(signal, str):
        signal = _tone(1000, float(signal.split("amp ")[1].split(",")[0]), 24_000, 24_000)
    return audio.dbfs(audio.rms(np.array(signal)))


def _dc_offset(case: Input) -> Any:
    signal = np.array(case["signal"])
    return {"mean": audio.dc_offset(signal), "ac_rms": audio.ac_rms(signal)}


def _durations(case: Input) -> Any:
    true, header = (audio.duration_s(case["samples"], case[rate]) for rate in ("true_sr", "header_sr"))
    return {"true_s": true, "header_s": header, "log2_ratio": audio.log_ratio(header, true) / math.log(2)}


def _log_ratio(case: Input) -> Any:
    return audio.log_ratio(case["served_s"], case["ref_s"])


def _snr(case: Input) -> Any:
    reference, estimate = np.array(case["ref"]), np.array(case["est"])
    return {"snr_db": audio.snr_db(reference, estimate), "si_sdr_db": audio.si_sdr_db(reference, estimate)}


def _lag(case: Input) -> Any:
    """Signals are given as "impulse at A of N"."""
    places = (case[key].removeprefix("impulse at ").split(" of ") for key in ("ref", "est"))
    return audio.lag(*(np.eye(1, int(length), int(at))[0] for at, length in places))


def _streamed_wav(case: Input) -> Any:
    frames = (case["total_bytes"] - case["header_bytes"]) // case["bytes_per_frame"]
    whole = encode_wav(np.zeros(frames), case["sr"])
    size_at = case["header_bytes"] - 4
    sent = whole[:size_at] + case["data_size_field"].to_bytes(4, "little") + whole[case["header_bytes"] :]
    decoded = decode(sent, Container.WAV)
    return {"frames": decoded.samples.shape[-1], "seconds": decoded.duration_s}


def _downmix(case: Input) -> Any:
    stereo = np.array([case["left"], case["right"]])
    return {"mono": audio.downmix(stereo), "per_channel_rms": audio.rms(stereo)}


def _centroid(case: Input) -> Any:
    tone = _tone(case["tone"], 0.5, case["true_sr"], case["true_sr"])
    return audio.centroid_hz(audio.spectrogram(tone, case["header_sr"]))


AUDIO: dict[str, Adapter] = {
    "rms_dbfs": _rms_dbfs,
    "dc_offset": _dc_offset,
    "int16_to_float": lambda case: audio.int16_to_float(np.array(case["samples"], np.int16)),
    "duration_wrong_header": _durations,
    "duration_log_ratio": _log_ratio,
    "double_generation_ratio": _log_ratio,
    "snr_vs_si_sdr": _snr,
    "xcorr_lag": _lag,
    "log_spectral_distance": lambda case: audio.log_spectral_distance(case["p_ref"], case["p_est"]),
    "wav_streaming_header": _streamed_wav,
    "downmix_cancellation": _downmix,
    "centroid_wrong_sr": _centroid,
    "silence_fraction": lambda case: audio.activity(case["frame_dbfs"], case["threshold_dbfs"]).silence_fraction,
}


# --- verdict rules -----------------------------------------------------------------------------------------------

ARM = "served_0_alone"


def _scores(rows: list[dict[str, Any]]) -> ScoreTable:
    """A score table of a few rows {item_id, arm, metric, value, flag?}."""
    fixed = {
        "config": "case",
        "set_id": "case",
        "unit": "nat",
        "direction": -1,
        "flag": "ok",
        "value": None,
        "aux": None,
    }
    table = pa.Table.from_pylist([fixed | row for row in rows], schema=SCORES)
    return ScoreTable.from_tables([table], {row["item_id"] for row in rows})


def _drafted(judge: GateJudge[TextTrial], table: ScoreTable) -> list[Gate]:
    options = TextGates()
    floor = cut_floor(table, {}, (), "float32", options)
    return settle([judge(TextTrial(table, ARM, floor, options, "float32"))], options)


def _passing(metric: str, status: Status = Status.PASS) -> Gate:
    return Gate(
        id=metric,
        arm=ARM,
        metric=metric,
        severity="gate",
        required=True,
        status=status,
        statistic=metric,
        value=None,
        unit="",
        detail=metric,
    )


def _covered(planned: int, failed: int = 0, reason: str = "") -> Coverage:
    lost = [Unscored(item_id=str(number), arm=ARM, reason=reason) for number in range(failed)]
    return Coverage(planned=planned, scored=planned - failed, failed=lost)


def _instance(*, never_ready: str | None = None, changed: list[str] | None = None) -> Instance:
    failure = StartupFailure(kind=FailureKind.NOT_READY, message=never_ready) if never_ready else None
    return Instance(
        instance=0,
        arms=[ARM],
        startup=Startup(ready=failure is None, failure=failure),
        changed=changed or [],
        cleanup=Cleanup(stopped_by="SIGINT", clean=True, port_free=True),
    )


def _unexplained(case: Input) -> Status:
    n, bad = case["prompts"], case["unexplained"]
    bound = stats.clopper_pearson(bad, n)
    test = {"name": "B", "alpha": 0.05, "n": n, "ci_high": bound.high}
    status = Status.FAIL if bad else Status.PASS
    gate = Gate.model_validate(_passing("G-hard", status).model_dump() | {"value": bad, "test": test})
    return decide(coverage=_covered(n), gates=[gate], claim=item_claim([gate]), claim_rate=case["claim_rate"]).status


def _requests(case: Input) -> Status:
    planned = case["requested"]
    failed = planned - case.get("ok", 0)
    instances = [_instance(never_ready=case["reason"])] if "reason" in case else []
    gates = [_passing("metric_on_ok")] if case.get("ok") else []
    return decide(coverage=_covered(planned, failed, "HTTP 500"), gates=gates, instances=instances).status


def _no_reference(case: Input) -> Status:
    same = case["within_instance_identical"] and case["cross_instance_identical"]
    gate = _passing("determinism", Status.PASS if same else Status.FAIL)
    return decide(coverage=_covered(1), gates=[gate], reference=case["reference"] != "none").status


def _served_values(case: Input) -> Status:
    rows = [
        {"item_id": str(number), "arm": ARM, "metric": metric, "value": entry, "flag": flag}
        for number, value in enumerate(case["metric_values"])
        for metric, entry, flag in (
            ("answered", 1.0, "ok"),
            ("margin_max", value, "ok") if math.isfinite(value) else ("margin_max", None, "nonfinite"),
        )
    ]
    return decide(coverage=_covered(len(rows)), gates=_drafted(structure_gate, _scores(rows))).status


def _reference_values(case: Input) -> Status:
    rows = [
        {"item_id": str(number), "arm": JUDGE, "metric": "margin_max", "flag": "ok", "value": value}
        if math.isfinite(value)
        else {"item_id": str(number), "arm": JUDGE, "metric": "margin_max", "flag": "nonfinite"}
        for number, value in enumerate(case["reference_values"])
    ]
    table = _scores(rows)
    problems = reference_problems(table, (), ())
    return decide(coverage=_covered(len(rows)), gates=[_passing("G-hard")], problems=problems).status


def _lossy_text(case: Input) -> Status:
    lossy = case["token_ids"] == "not returned" and not case["retokenized_canonical"]
    margin = {"metric": "margin_max", "flag": "undefined"} if lossy else {"metric": "margin_max", "value": 0.0}
    rows = [{"item_id": "0", "arm": ARM} | row for row in ({"metric": "answered", "value": 1.0}, margin)]
    return decide(coverage=_covered(1), gates=_drafted(hard_gate, _scores(rows))).status


def _shift(case: Input) -> Status:
    low, high = case["delta_wer_ci95"]
    status = noninferiority(low, high, case["margin"])
    caveat = {"code": "small_but_real", "detail": "inside the margin", "gate": "N"}
    caveats = [caveat] if status is Status.PASS_WITH_CAVEAT else []
    gate = Gate.model_validate(_passing("N", status).model_dump() | {"caveats": caveats})
    return decide(coverage=_covered(1), gates=[gate]).status


def _commits(case: Input) -> Status:
    changed = ["commit"] if case["served_commit_start"] != case["served_commit_end"] else []
    return decide(coverage=_covered(1), gates=[_passing("G-hard")], instances=[_instance(changed=changed)]).status


RULES: dict[str, Callable[[Input], Status]] = {  # the input key that tells a rule -> rule
    "unexplained": _unexplained,
    "requested": _requests,
    "within_instance_identical": _no_reference,
    "metric_values": _served_values,
    "reference_values": _reference_values,
    "retokenized_canonical": _lossy_text,
    "delta_wer_ci95": _shift,
    "served_commit_start": _commits,
}


def _verdict_rule(case: Input) -> str:
    rule = next((rule for key, rule in RULES.items() if key in case), None)
    if rule is None:
        raise _NotGiven(" or ".join(RULES))
    return rule(case).value


ADAPTERS: dict[str, Adapter] = {**TEXT, **STATS, **SPEECH, **AUDIO, "verdict_rule": _verdict_rule}
