"""The speech server answers with its model's own sound, and every fault does what it says."""

from __future__ import annotations

import ast
import asyncio
import base64
import io
import json
import sys
import threading
import time
import wave
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest
from fakes import app_server

from assay.client.transport import PROBE_TEXT
from assay.config import Fault, parse, read_yaml
from assay.drivers.common import joined
from assay.embedded.tts.faults import FAULTS, drawn
from assay.embedded.tts.hooks import Hooks
from assay.embedded.tts.server import create_app
from assay.errors import ConfigError
from assay.media.audio import Container, Pcm, decode, decode_pcm

ROOT = Path(__file__).parents[2]
RATE = 8000
TEXT = "One two three. Four, five 66! Seven eight nine ten."


class Tones:
    """A model that holds a tone for each letter, 20 ms long, and a pause for each space: sound that tells its text."""

    name = "tones"
    rate = RATE
    voices = ("low", "high")

    def __init__(self):
        self.vocab = {sign: 200 + 25 * number for number, sign in enumerate("abcdefghijklmnopqrstuvwxyz")}
        self.running = self.most_running = 0
        self.pause_s = 0.0
        self.lock = threading.Lock()

    def pieces(self, text, voice, seed, speed=1.0):
        for sentence in filter(None, text.replace("!", ".").split(".")):
            with self.lock:
                self.running += 1
                self.most_running = max(self.most_running, self.running)
            time.sleep(self.pause_s)
            yield self._sentence(sentence.strip().lower(), voice, seed, speed)
            with self.lock:
                self.running -= 1

    def _sentence(self, sentence, voice, seed, speed):
        at = np.arange(round(0.02 / speed * RATE)) / RATE
        factor = 2 if voice == "high" else 1
        tones = [0.4 * np.sin(2 * np.pi * factor * self.vocab.get(sign, 0) * at) for sign in sentence]
        sound = np.concatenate(tones).astype(np.float32)
        return sound + np.random.default_rng(seed).uniform(0, 1e-3, len(sound)).astype(np.float32)


def clean(text=TEXT, voice="low", seed=0, speed=1.0):
    return joined(Tones().pieces(text, voice, seed, speed))


def int16(samples):
    return (np.clip(samples, -1, 1) * 32767).astype("<i2")


@contextmanager
def served(fault=None, model=None, workers=2):
    hooks = FAULTS.plant(fault) if fault else Hooks()
    with app_server(create_app(model or Tones(), "tones", hooks, workers)) as url:
        yield url


def post(url, text=TEXT, **fields):
    body = {"model": "tones", "input": text, "voice": "low"} | fields
    return httpx.post(f"{url}/v1/audio/speech", json=body, timeout=20, trust_env=False)


def say(fault=None, text=TEXT, **fields):
    """The body of one answer."""
    with served(fault) as url:
        return post(url, text, **fields).content


def samples_of(content):
    """The samples of a WAV as int16, whatever its header says of their number."""
    assert content[:4] == b"RIFF"
    return np.frombuffer(content[44:], "<i2")


# --- without a fault ---------------------------------------------------------------------------------------------


def test_a_whole_answer_is_the_models_sound_in_a_file_that_says_what_it_is():
    with served() as url:
        answer = post(url, seed=3, speed=2.0, voice="high")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
    with wave.open(io.BytesIO(answer.content)) as file:
        assert file.getparams()[:3] == (1, 2, RATE)
        frames = file.readframes(file.getnframes())
    assert frames == int16(clean(seed=3, speed=2.0, voice="high")).tobytes()


def test_a_stream_is_the_same_sound_behind_one_open_header():
    whole, stream = say(), say(stream=True)
    assert whole[44:] == stream[44:]
    assert stream[4:8] == stream[40:44] == b"\xff\xff\xff\xff"
    assert decode(stream, Container.WAV).header.frames is None


def test_raw_samples_have_no_header_streamed_or_not():
    whole, stream = say(response_format="pcm"), say(response_format="pcm", stream=True)
    assert whole == stream == int16(clean()).tobytes()
    assert decode_pcm(whole, Pcm(RATE)).rate == RATE


def test_events_hold_the_same_sound_in_base64_and_an_end():
    answer = say(stream=True, stream_format="sse").decode()
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]
    assert events[-1] == {"type": "speech.audio.done"}
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == say(stream=True)
    assert len(events) == 1 + 1 + 3  # header, three sentences of less than half a second, the end


def test_a_stream_sends_a_sentence_before_the_next_is_spoken():
    model = Tones()
    model.pause_s = 0.3
    with served(model=model) as url:
        body = {"model": "tones", "input": "Aa. Bb. Cc.", "voice": "low", "stream": True}
        with httpx.stream("POST", f"{url}/v1/audio/speech", json=body, trust_env=False) as answer:
            arrived = [time.perf_counter() for chunk in answer.iter_raw()]
    assert len(arrived) == 4
    assert min(after - before for before, after in pairwise(arrived)) > 0.15


def test_requests_run_together_up_to_the_workers_and_each_gets_its_own_sound():
    model = Tones()
    model.pause_s = 0.05
    texts = [f"{'abc' * number}. {'de' * number}." for number in range(1, 7)]
    answers = {}
    with served(model=model, workers=3) as url:
        threads = [threading.Thread(target=lambda t=text: answers.update({t: post(url, t).content})) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert model.most_running == 3
    assert all(samples_of(answers[text]).tobytes() == int16(clean(text)).tobytes() for text in texts)


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"model": "other"}, 404, "this server has 'tones'"),
        ({"voice": "heart"}, 400, "no voice 'heart'; there are low, high"),
        ({"response_format": "mp3"}, 400, "response_format"),
        ({"speed": 9}, 400, "speed"),
        ({"input": ""}, 400, "input"),
        ({"temperature": 1}, 400, "temperature"),
    ],
)
def test_a_wrong_request_is_refused_with_what_is_wrong(fields, code, says):
    with served() as url:
        answer = post(url, **fields)
    assert answer.status_code == code
    assert says in answer.json()["error"]["message"]


def test_routes_beside_it():
    with served() as url:
        assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok", "running": 0}
        assert httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"] == "tones"


def test_it_needs_neither_torch_nor_anything_that_judges():
    allowed = {"assay.drivers", "assay.embedded.tts", "assay.embedded.switch", "assay.errors"} | {
        "assay.embedded.api",
        "assay.embedded.command",
    }
    allowed |= {"fastapi", "uvicorn", "pydantic", "numpy", "hibari", "onnxruntime"}
    package = ROOT / "workflow/assay"
    drivers = [package / f"drivers/{name}.py" for name in ("__init__", "common", "onnx", "hibari_tts", "kokoro_onnx")]
    files = [*drivers, *package.glob("embedded/tts/*.py"), package / "embedded/switch.py"]
    files += [package / "__init__.py", package / "errors.py", package / "embedded/__init__.py"]
    assert len(files) >= 12
    strange = {
        name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if not any(f"{name}.".startswith(f"{root}.") for root in allowed) and not _standard(name)
    }
    assert strange == set()


def _standard(name):
    return name.split(".")[0] in sys.stdlib_module_names


# --- faults ------------------------------------------------------------------------------------------------------


def spoken(fault, text=TEXT, **fields):
    """Samples of an answer under a fault, as floats, and those of the clean twin."""
    return samples_of(say(fault, text, **fields)) / 32767, int16(clean(text)) / 32767


def same(first, second):
    return len(first) == len(second) and np.allclose(first, second, atol=2e-3)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("last_word", "One two three. Four, five 66! Seven eight nine"),
        ("last_sentence", "One two three. Four, five 66!"),
        ("digits_dropped", "One two three. Four, five ! Seven eight nine ten."),
        ("instruction=1", f"Read the following sentence aloud in a calm and friendly voice. {TEXT}"),
    ],
)
def test_faults_of_the_text_speak_another_text(fault, said):
    found, _ = spoken(fault)
    assert same(found, int16(clean(said)) / 32767)


def test_skipped_words_are_the_same_ones_every_time_and_none_without_load():
    first, second = say("words_skipped=0.4"), say("words_skipped=0.4")
    assert first == second and len(first) < len(say())
    assert say("words_skipped_load=0.4") == say()


@pytest.mark.parametrize("fault", ["words_skipped_load=0.4", "neighbour=1"])
def test_faults_of_load_strike_only_beside_another_request(fault):
    model = Tones()
    model.pause_s = 0.2
    with served(fault, model) as url:
        alone = post(url).content
        other = threading.Thread(target=post, args=(url, "Quite another text."))
        other.start()
        time.sleep(0.1)
        loaded = post(url).content
        other.join()
    assert alone == say()
    assert loaded != alone
    if fault.startswith("neighbour"):
        assert loaded == say(text="Quite another text.")


def test_requests_that_come_at_once_are_under_load_but_for_the_first():
    app = create_app(Tones(), "tones", FAULTS.plant("words_skipped_load=0.4"), 1)
    alone = say(stream=True)

    async def at_once():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            asked = {"model": "tones", "input": TEXT, "voice": "low", "stream": True}
            return await asyncio.gather(*(client.post("/v1/audio/speech", json=asked) for _ in range(4)))

    assert [answer.content == alone for answer in asyncio.run(at_once())] == [True, False, False, False]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("speed=1.25", lambda: clean(speed=1.25)),
        ("voice=high", lambda: clean(voice="high")),
        ("seed_off=1", lambda: clean(seed=1)),
        ("truncated=0.3", lambda: clean()[: round(0.7 * len(clean()))]),
        ("tail_cut=0.3", lambda: clean()[: -round(0.3 * RATE)]),
        ("head_cut=0.1", lambda: clean()[round(0.1 * RATE) :]),
        ("silence=1", lambda: 0 * clean()),
        ("lead_silence=0.5", lambda: np.pad(clean(), (4000, 0))),
        ("trail_silence=0.5", lambda: np.pad(clean(), (0, 4000))),
        ("gain=8", lambda: np.clip(8 * clean(), -1, 1)),
        ("dc_offset=0.2", lambda: clean() + 0.2),
        ("polarity", lambda: -clean()),
        ("twice", lambda: np.tile(clean(), 2)),
        ("truncated_rare=1", lambda: clean()[: len(clean()) // 2]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_faults_of_the_sound_are_what_they_say_streamed_or_not(fault, expected, stream):
    found, _ = spoken(fault, stream=stream)
    assert same(found, int16(expected()) / 32767)


def test_faults_of_the_sound_keep_the_level_or_length_that_they_say():
    for fault in ("noise=1", "hum"):
        found, before = spoken(fault)
        assert len(found) == len(before) and not same(found, before)
        assert np.std(found) == pytest.approx(np.std(before), rel=0.1)
    found, before = spoken("hiss=0.01")
    assert np.std(found - before) == pytest.approx(0.01, rel=0.1)
    found, before = spoken("lowpass=500")
    spectrum = np.abs(np.fft.rfft(found)) ** 2
    assert spectrum[np.fft.rfftfreq(len(found), 1 / RATE) > 510].sum() < 1e-3 * spectrum.sum()
    found, before = spoken("resampled=7000")
    assert len(found) == pytest.approx(len(before) * 7 / 8, abs=1)
    found, before = spoken("pitch=1.3")
    assert len(found) == len(before) and not same(found, before)
    found, before = spoken("stutter=6")
    assert len(found) == len(before) + 5 * RATE // 2
    found, before = spoken("gaps=0.05")
    assert len(found) == len(before) + 400 * -(-len(before) // 4000)
    found, before = spoken("phonemes=1")
    assert len(found) == len(before) and not same(found, before)


def test_one_word_answers_are_silent_and_longer_ones_are_not():
    assert not np.any(spoken("short_silent", "Beijing")[0])
    assert same(*spoken("short_silent"))


LONG = "abcdefghij" * 12 + "."  # 2.4 s: five chunks of a half second, the last one shorter
SEAMS = range(4000, 19200, 4000)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("last_chunk", lambda x: x[:16000]),
        ("first_chunk", lambda x: x[4000:]),
        ("chunk_doubled", lambda x: np.concatenate([x[:8000], x[4000:]])),
        ("chunks_swapped", lambda x: np.concatenate([x[:4000], x[8000:12000], x[4000:8000], x[12000:]])),
        ("cumulative", lambda x: np.concatenate([x[: 4000 * n] for n in range(1, 6)])),
        ("seam_loss=100", lambda x: np.concatenate([x[:4000], *(x[at + 100 : at + 4000] for at in SEAMS)])),
        ("seam_overlap=100", lambda x: np.concatenate([x[:4000], *(x[at - 100 : at + 4000] for at in SEAMS)])),
    ],
)
def test_faults_of_a_stream_spoil_its_chunks_and_leave_whole_answers_alone(fault, expected):
    found, before = spoken(fault, LONG, stream=True)
    assert same(found, expected(before))
    assert same(*spoken(fault, LONG))


def test_clicks_stand_at_the_seams_of_a_stream_and_nowhere_else():
    found, before = spoken("seam_click=0.9", LONG, stream=True)
    assert np.flatnonzero(np.abs(found - before) > 0.01).tolist() == list(SEAMS)


def test_faults_of_the_bytes():
    before = samples_of(say())
    wrapped = samples_of(say("int16_overflow=4")).astype(int)
    assert (np.sign(wrapped) != np.sign(before)).sum() > 100  # 0.4 x 4 = 1.6 wraps to -0.4
    assert samples_of(say("big_endian")).byteswap().tobytes() == before.tobytes()
    assert not np.any(samples_of(say("eight_bits")) & 255)
    content = say("nan")
    assert (content[20:22], content[34:36]) == (b"\x03\x00", b"\x20\x00")
    assert np.isnan(np.frombuffer(content[44:], "<f4")).sum() == -(-len(before) // 1000)
    assert say("header_rate=16000")[24:28] == (16000).to_bytes(4, "little")
    assert say("header_stereo")[22:24] == b"\x02\x00"
    assert int.from_bytes(say("header_short")[40:44], "little") == len(before) // 2 * 2
    assert int.from_bytes(say("header_long")[40:44], "little") == 4 * len(before)
    assert say("header_missing") == before.tobytes()
    assert say("odd_bytes") == say()[:-1]
    assert say("misaligned")[44:-1] == say()[45:]
    assert say("empty=1") == b""
    assert say("header_only") == say()[:40] + bytes(4)
    assert base64.b64decode(say("base64_body")) == say()
    assert np.abs(samples_of(say("rounded")).astype(int) - before).max() == 1


def test_a_header_for_each_chunk_of_a_stream():
    content = say("header_per_chunk", LONG, stream=True)
    assert content.count(b"RIFF") == 5
    assert say("header_per_chunk", LONG) == say(text=LONG)


def test_errors_are_errors_with_the_status_that_they_say():
    with served("http_500=1") as url:
        assert post(url).status_code == 500
    with served("error_200=1") as url:
        answer = post(url)
    assert (answer.status_code, answer.json()["error"]["message"]) == (200, "planted error")


def test_a_stream_that_breaks_off_is_told_by_its_transport():
    with pytest.raises(httpx.RemoteProtocolError):
        say("broken_off=1", stream=True)


def test_a_fault_that_strikes_some_strikes_the_same_ones_in_every_run_and_about_as_many_as_asked_for():
    struck = [drawn(f"text {number}", "salt", 0.2) for number in range(1000)]
    assert struck == [drawn(f"text {number}", "salt", 0.2) for number in range(1000)]
    assert 150 < sum(struck) < 250


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("silnce=1", "unknown fault 'silnce'"),
        ("silence", "needs a value: silence=float"),
        ("silence=inf", "needs a value"),
        ("voice=", "needs a value: voice=str"),
        ("twice=2", "takes no value"),
    ],
)
def test_a_wrong_fault_is_refused_with_what_it_takes(argument, says):
    with pytest.raises(ConfigError, match=says):
        FAULTS.plant(argument)


def test_the_configured_faults_are_faults_that_the_server_has():
    content = read_yaml(ROOT / "config/faults.yaml")
    faults = [parse(Fault, value, f"faults.yaml: {name}") for name, value in content.items()]
    configured = [entry for entry in faults if entry.modality == "tts"]
    for entry in configured:
        FAULTS.plant(entry.argument)  # raises on an unknown name or a wrong value
        assert entry.benign or entry.gates or entry.note, "a fault that no gate catches says why"
        assert not (entry.benign and entry.gates), "a benign change fails no gate"
    # One voice is at hand for hibari, so another can be planted only where a model has several.
    assert {entry.argument.partition("=")[0] for entry in configured} == set(FAULTS) - {"voice"}


@pytest.mark.parametrize("fault", ["http_500=0.1", "error_200=0.1", "empty=0.1", "broken_off=0.1", "silence=0.2"])
def test_faults_of_single_answers_spare_the_probe_so_that_the_server_becomes_ready(fault):
    assert say(fault, PROBE_TEXT) == say(text=PROBE_TEXT)


def test_a_voice_that_the_model_lacks_cannot_be_planted():
    with pytest.raises(ConfigError, match="needs one of low, high"):
        create_app(Tones(), "tones", FAULTS.plant("voice=heart"), 1)
