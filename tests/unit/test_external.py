"""A reference command answers every item once, or one message says what is wrong and nothing is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from assay import store
from assay.errors import ReferenceFailure, SourceError
from assay.media.audio import encode_wav
from assay.references import external, tts
from assay.references.external import run

# A driver for tests: says how long each text is, in a tone; or does what its first argument says.
DRIVER = """
import json, sys
from pathlib import Path
what, requests, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
sound = Path(sys.argv[4]).read_bytes()
asked = [json.loads(line) for line in requests.read_text(encoding="utf-8").splitlines()]
audio = [{"id": request["id"], "file": f"{number}.wav"} for number, request in enumerate(asked)]
for entry in audio:
    (output / entry["file"]).write_bytes(sound)
(output.parent / "asked.json").write_text(json.dumps(asked))
exec(what)
(output / "manifest.json").write_text(json.dumps({"audio": audio, "versions": {"voice": "1.2"}}))
"""
REQUESTS = [{"id": name, "input": f"Text {name} é", "voice": "low"} for name in ("a", "b", "c")]


@pytest.fixture
def driver(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    tone = 0.1 * np.sin(np.arange(800, dtype=np.float32))
    (tmp_path / "sound.wav").write_bytes(encode_wav(tone, 8000))

    def command(what="pass"):
        return [
            sys.executable,
            str(tmp_path / "driver.py"),
            what,
            "{requests}",
            "{output}",
            str(tmp_path / "sound.wav"),
        ]

    return command


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_every_request_gets_its_file_and_the_command_gets_every_field(driver, folder, tmp_path):
    spoken = run(driver(), {}, REQUESTS, folder)
    assert list(spoken.files) == ["a", "b", "c"]
    assert {file.read_bytes() for file in spoken.files.values()} == {(tmp_path / "sound.wav").read_bytes()}
    assert spoken.versions == {"voice": "1.2"}
    assert json.loads((folder / "asked.json").read_text()) == REQUESTS


def test_the_command_runs_without_our_modules_and_with_its_own_variables(driver, folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "ours")
    what = "import os; assert 'PYTHONPATH' not in os.environ and os.environ['VOICE'] == 'x'"
    assert run(driver(what), {"VOICE": "x"}, REQUESTS, folder)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("del audio[1]; (output / '1.wav').unlink()", "1 without a file: b$"),
        ("audio[1]['id'] = 'd'", "1 without a file: b; 1 never asked for: d$"),
        ("audio[1]['id'] = 'a'", "1 without a file: b; 1 with several files: a$"),
        (
            "audio[1]['file'] = '0.wav'",
            "1 that share a file: 0.wav; 1 in files that the manifest does not name: 1.wav$",
        ),
        ("(output / '1.wav').unlink()", r"1 whose file is not there: b \(1.wav\)$"),
        ("audio[1]['file'] = '../asked.json'", "whose file is not there: b"),
        ("(output / 'more.wav').write_bytes(sound)", "1 in files that the manifest does not name: more.wav$"),
        ("(output / '1.wav').write_bytes(sound[:-9])", r"1 that cannot be read: b \(.*are there\)$"),
        ("(output / '1.wav').write_bytes(sound[:44])", r"1 that cannot be read: b \("),
        ("(output / '1.wav').write_bytes(b'')", r"1 that cannot be read: b \(the response has no bytes\)$"),
        (
            "(output / '1.txt').write_bytes(sound); (output / '1.wav').unlink(); audio[1]['file'] = '1.txt'",
            "is none of",
        ),
        ("sys.exit('no voice low')", "ended with exit status 1: no voice low$"),
        ("import nothing_of_that_name", "exit status 1: ModuleNotFoundError: No module named"),
        ("sys.exit(0)", "wrote no manifest.json"),
        ("audio = [{'name': 'a'}]", "manifest.json is not as expected .* KeyError"),
        ("audio = 7", "manifest.json is not as expected"),
    ],
)
def test_what_is_not_one_readable_file_for_each_item_is_told_in_one_message(driver, folder, what, says):
    with pytest.raises(ReferenceFailure, match=says):
        run(driver(what), {}, REQUESTS, folder)


def test_many_wrong_items_are_counted_and_some_named(driver, folder):
    requests = [{"id": f"item-{number}"} for number in range(9)]
    with pytest.raises(ReferenceFailure, match="9 without a file: item-0, item-1, item-2, item-3, item-4 and 4 more"):
        run(driver("audio.clear(); [file.unlink() for file in output.iterdir()]"), {}, requests, folder)


def test_a_command_that_is_not_there_is_named(folder):
    with pytest.raises(ReferenceFailure, match=r"cannot be started: /no/python: No such file"):
        run(["/no/python"], {}, REQUESTS, folder)


# --- the stage ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stage(driver, tmp_path, monkeypatch):
    """Runs the stage with a driver that does as it is told; returns the path of its table."""
    items = [
        {"item_id": name, "set_id": "set", "request": json.dumps({"input": f"Text {name}"})} for name in ("a", "b")
    ]
    monkeypatch.setattr(tts, "load_set", lambda path: items)
    monkeypatch.setattr(tts, "verify_weights", lambda path: "5" * 64)
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "set.parquet").write_bytes(b"")
    ran = []
    monkeypatch.setattr(tts, "run", lambda *arguments: ran.append(arguments) or external.run(*arguments))

    def reference(what="pass", arm="judge", request=None):
        options = {
            "python": sys.executable,
            "library": "lib",
            "environment": "voices",
            "command": driver(what),
            "env": {"PYTHONPATH": "{library}"},
            "changes": {"threads": ["--threads=2"]},
            "request": {"voice": "low", "seed": 0} if request is None else request,
        }
        output = tmp_path / "out" / f"{arm}.parquet"
        output.parent.mkdir(exist_ok=True)
        tts.reference(tmp_path, tmp_path / "set.parquet", arm, options, output)
        return output, ran[-1]

    return reference


def test_the_table_has_the_sound_of_every_item_and_how_it_was_made(stage, tmp_path):
    path, (argv, env, requests, _) = stage()
    rows = store.read_rows(path, "responses")
    assert [(row["item_id"], row["set_id"], row["arm"], row["status"]) for row in rows] == [
        ("a", "set", "judge", "ok"),
        ("b", "set", "judge", "ok"),
    ]
    assert rows[1]["audio"] == {"bytes": (tmp_path / "sound.wav").read_bytes(), "path": "b.wav"}
    assert requests == [{"id": name, "voice": "low", "seed": 0, "input": f"Text {name}"} for name in ("a", "b")]
    assert env == {"PYTHONPATH": "lib"} and "--threads=2" not in argv
    recorded = store.read_provenance(path)["options"]
    assert (recorded["versions"], recorded["environment"], recorded["settings"]["argv"]) == (
        {"voice": "1.2"},
        "voices",
        argv,
    )


def test_a_floor_arm_adds_the_arguments_of_its_change(stage):
    _, (argv, *_) = stage(arm="float32-threads")
    assert argv[-1] == "--threads=2"


def test_what_stood_there_stays_when_the_command_fails(stage):
    path, _ = stage()
    before = path.read_bytes()
    with pytest.raises(ReferenceFailure):
        stage("del audio[0]")
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_changed_weights_are_refused_before_anything_runs(stage, monkeypatch):
    def changed(path: Path) -> str:
        raise SourceError("not the weights of the manifest")

    monkeypatch.setattr(tts, "verify_weights", changed)
    with pytest.raises(SourceError):
        stage()
