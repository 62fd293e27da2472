"""The suite of speech synthesis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from assay import store
from assay.config import TtsGates
from assay.metrics import stats
from assay.verdicts.model import Claim, Gate
from assay.verdicts.suite import Check, Suite
from assay.verdicts.tts.contract import bleed_gate, contract_gate, header_gate
from assay.verdicts.tts.hits import CATASTROPHE, DAMAGE, ENDS, WINDOW, HitSpec, hit_gate, waveform_gate
from assay.verdicts.tts.planted import CONTROLS
from assay.verdicts.tts.seams import seam_gate
from assay.verdicts.tts.shifts import DURATION, LOAD, WER, ShiftSpec, shift_gate, speaker_gate, stream_gate
from assay.verdicts.tts.trial import SpeechTrial, cut_floor


def lost_claim(gates: Sequence[Gate]) -> Claim | None:
    """The bound on the rate of items whose words are lost, from the pass with most of them."""
    lost = [gate for gate in gates if gate.id == CATASTROPHE.id and gate.test and gate.test.n]
    if not lost:
        return None
    bad, n = max((round(gate.value or 0), gate.test.n) for gate in lost if gate.test)
    return Claim(bad=bad, n=n, rate_upper95=stats.clopper_pearson(bad, n).high)


def unread(judged: Path) -> dict[tuple[str, str], str]:
    """(arm, item) -> what is wrong with the bytes of answers that cannot be decoded."""
    rows = store.read_rows(judged, "transcripts", ["item_id", "arm", "fault", "error"])
    return {(row["arm"], row["item_id"]): f"{row['fault']}: {row['error']}" for row in rows if row["fault"]}


def content(judged: Path) -> dict[tuple[str, str], str]:
    """(arm, item) -> hash of the samples: a streamed answer and a whole one have other headers."""
    rows = store.read_rows(judged, "transcripts", ["item_id", "arm", "pcm_sha256"])
    return {(row["arm"], row["item_id"]): row["pcm_sha256"] for row in rows if row["pcm_sha256"]}


def _hits(spec: HitSpec) -> Check[SpeechTrial]:
    return Check(partial(hit_gate, spec=spec), needs=spec.metric, on_floor=True)


def _shift(spec: ShiftSpec) -> Check[SpeechTrial]:
    return Check(partial(shift_gate, spec=spec), needs=spec.metric, on_floor=True)


TTS = Suite(
    options=TtsGates,
    trial=SpeechTrial,
    cut_floor=cut_floor,
    gates={
        "G-contract": Check(contract_gate),
        "G-header": Check(header_gate),
        "G-damage": _hits(DAMAGE),
        "G-duration": _shift(DURATION),
        "G-speaker": Check(speaker_gate, on_floor=True),
        "G-wer": _shift(WER),
        "G-catastrophe": _hits(CATASTROPHE),
        "G-ends": _hits(ENDS),
        "G-window": _hits(WINDOW),
        "G-bleed": Check(bleed_gate, on_floor=True),
        "G-load": _shift(LOAD),
        "G-stream": Check(stream_gate, needs="stream_samples"),
        "G-seams": Check(seam_gate, needs="seam_clicks"),
        # Its limit is the largest of the floor arms: with one of two left out it is another limit.
        "G-waveform": Check(waveform_gate, needs="waveform_noise"),
    },
    controls=CONTROLS,
    counts={"spoken": "wer_errors", "long": "window_wer"},
    claim=lost_claim,
    unread=unread,
    content=content,
)
