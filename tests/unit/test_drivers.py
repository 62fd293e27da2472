"""Drivers: every request is spoken as asked, or refused; and a model runs on the provider asked for, or not at all."""

from __future__ import annotations

import importlib
import json
import sys
import types

import numpy as np
import pytest

from assay.drivers.common import drive, joined, speak
from assay.errors import ServerError


class Counting:
    """A model that says its seed, length and speed in numbers."""

    name = "counting"
    rate = 8000
    voices = ("low", "high")
    vocab: dict[str, int] = {}

    def pieces(self, text, voice, seed, speed):
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
