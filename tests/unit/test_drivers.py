"""Drivers: every request is spoken as asked, or refused; and a model runs on the provider asked for, or not at all."""

from __future__ import annotations

import importlib
import json
import sys
import types
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from assay.config import load
from assay.drivers.common import drive, joined, speak
from assay.drivers.torch import writer
from assay.errors import ServerError
from assay.media.audio import Container, decode


class Counting:
    """A model that says its seed, length and speed in numbers."""

    name = "counting"
    rate = 8000
    voices = ("low", "high")
    options = frozenset({"speed"})

    def pieces(self, text, voice, seed, speed=1.0):
        for word in text.split():
            yield np.array([len(word), seed, speed, self.voices.index(voice)], np.float32)


def test_a_request_is_spoken_with_its_own_seed_speed_and_voice_and_defaults_for_what_it_leaves_out():
    request = {"id": "a", "input": "one three", "voice": "high", "seed": 5, "speed": 2.0}
    assert speak(Counting(), request).tolist() == [3, 5, 2, 1, 5, 5, 2, 1]
    assert speak(Counting(), {"id": "a", "input": "one"}, seed_offset=3).tolist() == [3, 3, 1, 0]
    assert joined(iter(())).shape == (0,)


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"voice": "heart"}, "request a: no voice 'heart'; there are low, high"), ({"pitch": 2}, "has no option pitch")],
)
def test_what_a_model_cannot_do_is_refused_and_not_lost(fields, says):
    with pytest.raises(ServerError, match=says):
        speak(Counting(), {"id": "a", "input": "one", **fields})


def command(monkeypatch, tmp_path, requests, *options):
    """Run a driver's command over `requests`; what it wrote, by file name."""
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    (tmp_path / "output").mkdir()
    argv = ["driver", f"--model={tmp_path}", f"--requests={tmp_path}/requests.jsonl", f"--output={tmp_path}/output"]
    monkeypatch.setattr(sys, "argv", [*argv, *options])
    drive(lambda options: Counting(), lambda path, samples: path.write_text(str(samples.tolist())), ("numpy",))
    return {path.name: path.read_text() for path in (tmp_path / "output").iterdir()}


def test_a_command_writes_a_file_for_each_request_and_their_list(monkeypatch, tmp_path):
    requests = [{"id": "b/1", "input": "one"}, {"id": "a", "input": "three"}]
    written = command(monkeypatch, tmp_path, requests, "--seed-offset=2")
    manifest = json.loads(written.pop("manifest.json"))
    assert manifest["audio"] == [{"id": "b/1", "file": "00000.wav"}, {"id": "a", "file": "00001.wav"}]
    assert manifest["versions"] == {"numpy": np.__version__}
    assert written == {"00000.wav": "[3.0, 2.0, 1.0, 0.0]", "00001.wav": "[5.0, 2.0, 1.0, 0.0]"}


def test_a_command_ends_with_one_message_for_a_wrong_request(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        command(monkeypatch, tmp_path, [{"id": "a", "input": "one", "voice": "heart"}])
    assert left.value.code == 2
    assert capsys.readouterr().err.strip().endswith("no voice 'heart'; there are low, high")


# --- execution providers -----------------------------------------------------------------------------------------


@pytest.fixture
def onnx(monkeypatch):
    """The module over a stand-in for onnxruntime, which the project lacks; `onnx.made` lists the sessions made."""
    made = []

    class Session:
        runs_on = None

        def __init__(self, path, options, providers):
            self.providers = [self.runs_on or providers[0], "CPUExecutionProvider"]
            made.append((path.name, providers, options.intra_op_num_threads))

        def get_providers(self):
            return self.providers

    fake = types.ModuleType("onnxruntime")
    fake.__version__ = "9.9"
    fake.get_available_providers = lambda: ["ROCMExecutionProvider", "CPUExecutionProvider"]
    fake.SessionOptions = types.SimpleNamespace
    fake.InferenceSession = Session
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    monkeypatch.delitem(sys.modules, "assay.drivers.onnx", raising=False)
    module = importlib.import_module("assay.drivers.onnx")
    monkeypatch.delitem(sys.modules, "assay.drivers.onnx")
    module.made, module.fake = made, fake
    return module


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"model")
    return tmp_path / "model.onnx"


def test_a_model_runs_on_the_provider_asked_for_with_the_threads_asked_for(onnx, model):
    assert onnx.session(model).get_providers()[0] == "CPUExecutionProvider"
    onnx.session(model, "ROCMExecutionProvider", 2)
    assert onnx.made == [
        ("model.onnx", ["CPUExecutionProvider"], 1),
        ("model.onnx", ["ROCMExecutionProvider"], 2),
    ]


def test_a_provider_that_is_not_there_is_refused_before_the_model_is_loaded(onnx, model):
    with pytest.raises(ServerError, match=r"'CUDAExecutionProvider' is not there: onnxruntime 9\.9 has ROCMExec"):
        onnx.session(model, "CUDAExecutionProvider")
    assert onnx.made == []


def test_a_model_that_falls_back_to_another_provider_is_refused(onnx, model):
    onnx.fake.InferenceSession.runs_on = "CPUExecutionProvider"
    with pytest.raises(ServerError, match=r"was asked for, and model\.onnx runs on CPUExecutionProvider"):
        onnx.session(model, "ROCMExecutionProvider")


def test_a_missing_model_is_named(onnx, tmp_path):
    with pytest.raises(ServerError, match=r"no model at .*other\.onnx"):
        onnx.session(tmp_path / "other.onnx")


# --- models over torch, by stand-ins for their packages, which the project lacks -------------------------------------


class Package:
    """A model of any of the packages: it draws three samples and keeps what it was asked for."""

    sampling_rate, conds = 24000, "a voice"

    def __init__(self, *arguments, **options):
        self.asked = []

    from_pretrained = classmethod(lambda cls, *arguments, **options: cls())

    @classmethod
    def from_local(cls, folder, device):
        assert device == "cpu" and isinstance(device, str)  # where it is not, files saved on CUDA cannot be read
        return cls()

    def get_supported_speakers(self):
        return ["vivian"]

    def draw(self, **asked):
        self.asked.append(asked)
        return torch.rand(1, 3)

    def generate_custom_voice(self, text, speaker, **options):
        return [self.draw(text=text, speaker=speaker, **options).numpy()], 24000

    def generate(self, text, **options):
        return self.draw(text=text, **options)

    def to(self, device):
        return self

    eval = to


class Pipeline(Package):
    def __call__(self, text, voice, **options):
        yield types.SimpleNamespace(audio=self.draw(text=text, voice=voice, **options)[0])
        yield types.SimpleNamespace(audio=None)


FAKES = {
    "qwen_tts": {"Qwen3TTSModel": Package},
    "chatterbox.mtl_tts": {"ChatterboxMultilingualTTS": Package},
    "chatterbox.tts": {"ChatterboxTTS": Package},
    "chatterbox.tts_turbo": {"ChatterboxTurboTTS": Package},
    "omnivoice": {"OmniVoice": Package},
    "kokoro": {"KModel": type("KModel", (Package,), {"eval": lambda self: self}), "KPipeline": Pipeline},
    "spacy": {"util": types.SimpleNamespace(is_package=lambda name: True), "__version__": "3.8"},
}
DRIVERS = {"qwen3_tts": "Qwen3Tts", "chatterbox": "Chatterbox", "omnivoice": "OmniVoiceModel", "kokoro": "KokoroModel"}
FAMILIES = {
    name: family
    for name, family in load({"site": "h100"}, Path(__file__).parents[2] / "config").families.items()
    if family.modality == "tts" and "transformers" in family.model.weights
}


def loaded(monkeypatch, folder, family, **changes):
    """The model that the command of a family loads, as its class makes it."""
    for name, content in FAKES.items():
        fake = types.ModuleType(name)
        vars(fake).update(content)
        monkeypatch.setitem(sys.modules, name, fake)
    driver = next(word for word in family.reference.command if word.startswith("assay.drivers."))
    monkeypatch.delitem(sys.modules, driver, raising=False)
    module = importlib.import_module(driver)
    monkeypatch.delitem(sys.modules, driver)
    (folder / "voices").mkdir()
    (folder / "voices/af_heart.pt").touch()
    (folder / "audio_tokenizer").mkdir()
    said = dict(word.removeprefix("--").split("=") for word in family.reference.command if word.startswith("--variant"))
    options = {"model": folder, "device": "cpu", "dtype": "float32", "threads": 1, **said, **changes}
    return getattr(module, DRIVERS[driver.rpartition(".")[2]])(Namespace(**options))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_asks_for_is_what_its_driver_takes_and_its_seed_alone_draws(monkeypatch, tmp_path, name):
    request = {"id": "a", "input": "One.", **FAMILIES[name].request}
    model = loaded(monkeypatch, tmp_path, FAMILIES[name])
    first, again, other = (speak(model, request, offset) for offset in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist() and first.shape == (3,)
    asked = (getattr(model, "_pipeline", None) or model._model).asked[0]
    assert asked.pop("text") == "One."
    sent = {key: value for key, value in request.items() if key not in ("id", "input", "voice", "seed", "watermark")}
    assert {key: value for key, value in asked.items() if key not in ("speaker", "voice")} == sent
    with pytest.raises(ServerError, match="has no option cfg_scale"):
        speak(model, request | {"cfg_scale": 1})


def test_a_watermark_cannot_be_left_out_of_chatterbox(monkeypatch, tmp_path):
    model = loaded(monkeypatch, tmp_path, FAMILIES["chatterbox"])
    with pytest.raises(ServerError, match="watermark: false was asked for, and chatterbox-tts marks all"):
        speak(model, {"id": "a", "input": "One.", "watermark": False})


def test_a_device_that_is_not_there_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ServerError, match=r"device 'cuda:7' is not there: .* nothing falls back to the CPU"):
        loaded(monkeypatch, tmp_path, FAMILIES["omnivoice"], device="cuda:7")


@pytest.mark.parametrize(
    ("name", "gone", "says"),
    [("omnivoice", "audio_tokenizer", "another would be downloaded"), ("kokoro", None, "en_core_web_sm is missing")],
)
def test_what_a_package_would_download_is_refused(monkeypatch, tmp_path, name, gone, says):
    monkeypatch.setattr(FAKES["spacy"]["util"], "is_package", lambda name: False)
    monkeypatch.setattr(Path, "is_dir", lambda path: path.name != gone)
    with pytest.raises(ServerError, match=says):
        loaded(monkeypatch, tmp_path, FAMILIES[name])


def test_samples_are_written_as_a_wav_file_of_16_bits(tmp_path):
    writer(24000)(tmp_path / "a.wav", np.array([0, 0.5, -2], np.float32))
    audio = decode((tmp_path / "a.wav").read_bytes(), Container.WAV)
    assert audio.rate == 24000 and (audio.samples[0] * 32768).round().tolist() == [0, 16384, -32767]
