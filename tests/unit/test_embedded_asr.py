"""The embedded transcription server: Whisper on audio of any length, and faults that each show in what it says."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import tiny_whisper
import torch
from fakes import app_server
from sounds import voice
from tiny_whisper import END, FIRST_STAMP
from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

from assay.client.openai import OpenAIPlan
from assay.client.transport import send_set
from assay.config import Fault, OpenAISpec, parse, read_yaml
from assay.embedded.asr import __main__ as command
from assay.embedded.asr.engine import Cut, Engine, cut
from assay.embedded.asr.faults import FAULTS
from assay.embedded.asr.hooks import Hooks, Request
from assay.embedded.asr.server import create_app
from assay.errors import ConfigError
from assay.media.audio import encode_wav
from assay.samples.sounds import resampled, wav

PATH = "/v1/audio/transcriptions"
RATE = 16_000
VOICE = voice(3.0, RATE)
STEREO = np.round(voice(5.0, RATE, seed=2) * 32767).astype(np.int16)
CLIPS = {
    "short": encode_wav(VOICE, RATE),
    "other": encode_wav(voice(4.0, RATE, seed=1), RATE),
    "stereo": wav(resampled(STEREO, RATE, 44_100, 2), 44_100),
    "long": encode_wav(voice(65.0, RATE, seed=3), RATE),
}


class Heard(Hooks):
    """No window is left out: a model of random weights is sure of nothing."""

    def silent(self, no_speech_prob, avg_logprob):
        return False


@contextmanager
def served(folder, hooks):
    """Serve `folder` in float32; yield the base URL."""
    with Engine(folder, torch.float32, hooks) as engine, app_server(create_app(engine, "tiny")) as url:
        yield url


def ask(url, names=tuple(CLIPS), concurrency=1):
    """Rows of clips, by name."""
    spec = OpenAISpec(protocol="openai", routes={"transcription": PATH}, model="x", logprobs=True, timeout_s=120)
    request = json.dumps({"file": "clip.wav", "language": "en", "temperature": 0})
    items = [
        {"item_id": name, "set_id": "s", "request": request, "audio": {"bytes": CLIPS[name], "path": "clip.wav"}}
        for name in names
    ]
    rows = asyncio.run(send_set(OpenAIPlan.of(spec, url, "tiny"), items, "served_0_alone", concurrency))
    return {row["item_id"]: row for row in rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_whisper.build(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def url(folder):
    with served(folder, Heard()) as address:
        yield address


@pytest.fixture(scope="module")
def clean(url):
    return ask(url)


# --- what is served ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(folder):
    return WhisperForConditionalGeneration.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def features(folder):
    """Of the short clip, as its file holds it."""
    samples = np.round(VOICE * 32767) / 32768
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    return extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features


def test_a_short_clip_is_what_transformers_generates(model, features, clean):
    with torch.inference_mode():
        expected = model.generate(features, language="en", task="transcribe", return_timestamps=True)
    ids = clean["short"]["token_ids"]
    assert ids and expected[0].tolist()[: len(ids)] == ids  # what follows the last pair of timestamps is in no segment


def test_reported_logprobs_are_those_of_the_models_own_logits(model, features, clean):
    row = clean["short"]
    ids = torch.tensor([row["prompt_token_ids"] + row["token_ids"]])
    with torch.inference_mode():
        logprobs = model(features, decoder_input_ids=ids).logits[0].log_softmax(-1)
    expected = [float(logprobs[place + 2, token]) for place, token in enumerate(row["token_ids"])]
    assert row["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    assert row["top_token_ids"][0] == logprobs[2].topk(20).indices.tolist()


def test_evidence_is_full_and_the_text_is_that_of_the_ids(folder, clean):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in clean.values():
        assert (row["status"], row["evidence"], row["language"]) == ("ok", "E0", "en")
        assert row["prompt_token_ids"] == [END + 1, END + 2, END + 5]
        assert row["text"] == "".join(segment["text"] for segment in row["segments"])
        assert tokenizer.decode(row["token_ids"], skip_special_tokens=True) == row["text"]


def test_long_audio_is_heard_to_its_end_and_times_go_on(clean):
    segments = clean["long"]["segments"]
    starts = [segment["start"] for segment in segments]
    assert starts == sorted(starts) and segments[-1]["start"] >= 30
    assert all(0 <= segment["start"] < segment["end"] <= 90 for segment in segments)


def test_a_batch_says_what_each_request_alone_says(url, clean):
    assert not struck(ask(url, concurrency=4), clean, "token_ids")


def test_the_language_is_found_out_where_none_is_given(url):
    answer = post(url, response_format="verbose_json")
    assert answer.status_code == 200 and answer.json()["language"] in ("en", "de")


def test_plain_json_is_the_text_alone(url, clean):
    assert post(url, language="en").json() == {"text": clean["short"]["text"]}


# --- what is refused ---------------------------------------------------------------------------------------------


def post(url, content=CLIPS["short"], name="clip.wav", **fields):
    return httpx.post(url + PATH, data={"model": "tiny"} | fields, files={"file": (name, content)}, timeout=60)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"content": b""}, "has no bytes"),
        ({"content": CLIPS["short"][:1000]}, "declares"),
        ({"content": b"RIFF"}, "file: "),
        ({"content": b'{"error": "x"}'}, "is JSON, not audio"),
        ({"name": "clip.flac"}, "declared to be flac and is wav"),
        ({"name": "clip.txt"}, "'clip.txt' ends in none of"),
        ({"language": "xx"}, "language: 'xx' is none of de, en"),
        ({"temperature": "0.5"}, "temperature: "),
        ({"response_format": "srt"}, "response_format: "),
        ({"prompt": "Hello"}, "prompt: Extra inputs"),
    ],
)
def test_a_request_that_cannot_be_answered_gets_one_message(url, request_, message):
    answer = post(url, **request_)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_an_unknown_model_is_not_found_and_a_form_without_file_refused(url):
    assert post(url, model="base").status_code == 404
    assert "file is missing" in httpx.post(url + PATH, data={"model": "tiny"}).json()["error"]["message"]


def test_a_wrong_folder_or_fault_is_one_line(tmp_path, capsys, monkeypatch):
    for words, message in (([], "preprocessor_config.json"), (["--fault", "x"], "known:")):
        monkeypatch.setattr("sys.argv", ["asr", "--model", str(tmp_path), *words])
        with pytest.raises(SystemExit, match="2"):
            command.main()
        assert message in capsys.readouterr().err


# --- windows -----------------------------------------------------------------------------------------------------


def at(seconds):
    return FIRST_STAMP + round(seconds / 0.02)


@pytest.mark.parametrize(
    ("ids", "cuts", "used"),
    [
        # One segment to its last timestamp; the window is used up.
        ([at(0), 1, 2, at(2)], [Cut(0.0, 2.0, 0, 4)], 3000),
        # A pair ends a segment, a single timestamp at the end the window.
        ([at(0), 1, at(2), at(3), 2, at(5)], [Cut(0.0, 2.0, 0, 3), Cut(3.0, 5.0, 3, 6)], 3000),
        # What follows the last pair is heard again, from its first timestamp on.
        ([at(0), 1, at(2), at(2), 2, 3], [Cut(0.0, 2.0, 0, 3)], 200),
        # No end: the segment lasts as long as the audio.
        ([at(0), 1, 2], [Cut(0.0, 30.0, 0, 3)], 3000),
        ([], [Cut(0.0, 30.0, 0, 0)], 3000),
        # A pair at zero would go round for ever.
        ([at(0), at(0), 1], [Cut(0.0, 0.0, 0, 1)], 3000),
    ],
)
def test_a_window_is_cut_at_its_timestamps(ids, cuts, used):
    assert cut(ids, FIRST_STAMP, 3000) == (cuts, used)


# --- faults ------------------------------------------------------------------------------------------------------


def answers(folder, fault, concurrency=1):
    """Rows of a server with a fault planted, that leaves no window out."""
    hooks = FAULTS.plant(fault)
    if type(hooks).silent is Hooks.silent:
        hooks.silent = Heard().silent
    with served(folder, hooks) as url:
        return ask(url, concurrency=concurrency)


def struck(rows, clean, column):
    return {name for name in clean if rows[name][column] != clean[name][column]}


ALL = set(CLIPS)


@pytest.mark.parametrize(
    ("fault", "items"),
    [
        ("rate_ignored", {"stereo"}),
        ("rate_as=24000", ALL),
        ("resampled_by_steps", {"stereo"}),
        ("channels_interleaved", {"stereo"}),
        ("channels_subtracted", {"stereo"}),
        ("audio_clipped=30", ALL),
        ("start_lost=1", ALL),
        ("tail_lost=1", ALL),
        ("tail_lost_rarely=1", ALL),
        ("mel_htk", ALL),
        ("mel_hop=200", ALL),
        ("mel_unscaled", ALL),
        ("padding_zero", ALL),
        ("padding_stale", {"other", "stereo", "long"}),
        ("later_windows_lost", {"long"}),
        ("windows_overlap=2", {"long"}),
        ("windows_gap=2", {"long"}),
        ("encoder_layer_dropped=1", ALL),
        ("decoder_layer_dropped=1", ALL),
        ("positions_shifted=1", ALL),
        ("weights=8", ALL),
        ("weights=4", ALL),
        ("weight_noise=0.01", ALL),
        ("language_forced=de", ALL),
        ("translated", ALL),
        ("logprobs_shifted", ALL),
        ("logprobs_temperature=0.7", ALL),
    ],
)
def test_faults_of_what_is_computed_show_in_logprobs_of_the_items_they_strike(folder, clean, fault, items):
    assert struck(answers(folder, fault), clean, "token_logprobs") == items


@pytest.mark.parametrize(
    ("fault", "column"),
    [
        ("times_shifted=40", "segments"),
        ("times_swapped", "segments"),
        ("times_in_text", "text"),
        ("first_word_lost", "text"),
        ("last_word_lost", "text"),
    ],
)
def test_faults_of_the_answer_change_it_and_leave_the_ids(folder, clean, fault, column):
    rows = answers(folder, fault)
    assert struck(rows, clean, column) and not struck(rows, clean, "token_ids")


@pytest.mark.parametrize(
    ("fault", "text", "expected"),
    [
        ("lower_case", " Ten of Clubs.", " ten of clubs."),
        ("unpunctuated", " Don't go, 5.", " Don't go 5"),
        ("digits_spelled", " Dial 42, or 7.", " Dial four two, or seven."),
    ],
)
def test_faults_of_the_text_do_what_they_say(fault, text, expected):
    assert FAULTS.plant(fault).text(text) == expected


def test_segments_are_lost_repeated_and_made_up(folder, clean):
    assert {row["text"] for row in answers(folder, "empty_rarely=1").values()} == {""}
    lost, repeated = answers(folder, "last_segment_lost"), answers(folder, "repeated=5")
    for name, row in clean.items():
        segments = row["segments"]
        assert lost[name]["segments"] == (segments[:-1] if len(segments) > 1 else segments)
        assert repeated[name]["segments"] == segments + segments[-1:] * 5
    (filled,) = FAULTS.plant("silence_filled").segments([], Request(0, np.zeros(RATE, np.float32), "en"))
    assert (filled.text, filled.end) == (" Thank you for watching!", 1.0)


@pytest.mark.parametrize(
    ("seconds", "last", "later"), [(20, 20, 20), (30, 30, 30), (35, 30, 30), (60, 30, 30), (72, 60, 30)]
)
def test_the_last_window_or_all_but_the_first_are_lost_of_several(seconds, last, later):
    asked = Request(0, np.zeros(seconds * RATE, np.float32), "en")
    left = [len(FAULTS.plant(name).request(asked).samples) for name in ("last_window_lost", "later_windows_lost")]
    assert left == [last * RATE, later * RATE]


def test_times_of_a_window_begin_at_zero_again(folder):
    assert max(segment["start"] for segment in answers(folder, "times_of_window")["long"]["segments"]) < 30


@pytest.mark.parametrize("fault", ["neighbours", "tail_lost_under_load=2"])
def test_a_fault_of_load_needs_load(folder, clean, fault):
    assert not struck(answers(folder, fault), clean, "token_logprobs")
    assert struck(answers(folder, fault, concurrency=4), clean, "token_logprobs")


def test_failures_are_told_as_such(folder):
    assert [row["status"] for row in answers(folder, "http_500=2").values()].count("http_error") == 1
    assert {row["status"] for row in answers(folder, "logprobs_nan").values()} == {"nonfinite"}


def test_silence_is_what_the_threshold_says():
    clean, deaf, hearing = Hooks(), FAULTS.plant("silence_everywhere=0.02"), FAULTS.plant("silence_unchecked")
    assert clean.silent(0.7, -1.2) and not clean.silent(0.7, -0.9) and not clean.silent(0.5, -1.2)
    assert deaf.silent(0.03, -0.1) and not hearing.silent(0.99, -9.0)


@pytest.mark.parametrize("change", ["rerun", "max_rows=1", "max_rows=8", "threads=2"])
def test_benign_changes_change_no_transcript(folder, clean, change):
    rows = answers(folder, change, concurrency=4)
    assert not struck(rows, clean, "token_ids") and not struck(rows, clean, "segments")


def test_a_layer_that_is_not_there_is_refused(folder):
    with pytest.raises(ConfigError, match="a layer from 0 to 1"):
        Engine(folder, torch.float32, FAULTS.plant("encoder_layer_dropped=2"))


def test_the_configured_faults_are_the_ones_the_server_has():
    content = read_yaml(Path(__file__).parents[2] / "config" / "faults.yaml")
    configured = [parse(Fault, value, f"faults.yaml: {name}") for name, value in content.items()]
    ours = [entry for entry in configured if entry.modality == "asr"]
    for entry in ours:
        FAULTS.plant(entry.argument)  # raises on an unknown name or a wrong value
        assert entry.benign or entry.gates or entry.note, "a fault that no gate catches says why"
        assert not (entry.benign and entry.gates), "a benign change fails no gate"
    assert {entry.argument.partition("=")[0] for entry in ours} == set(FAULTS)
