"""A verdict for a person, also when there is little to show."""

import io

import numpy as np
import pytest
from rich.console import Console
from speech_run import SpeechRun
from synthetic import TOOL, World, devices, instance

from assay import store
from assay.explain import explain
from assay.records import Status
from assay.run import run_of
from assay.verdicts.decide import judge_run
from assay.verdicts.model import Facts, Startup, StartupFailure


def write(folder, world, **facts):
    store.write_table(folder / "scores/x.parquet", "scores", store.sort_table("scores", world.scores()), {})
    verdict = judge_run(world.table(), world.margins(), world.facts(**facts), TOOL, {"rule": "verdict"})
    store.write_json(folder / "verdicts/x.json", verdict.model_dump(mode="json"))
    return verdict, folder / "verdicts/x.json"


def shown(path):
    console = Console(width=300, record=True, file=io.StringIO())
    explain(path, console)
    return console.export_text()


def test_a_verdict_is_found_from_its_own_folder(tmp_path, monkeypatch):
    (tmp_path / "results/verdicts").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "results/verdicts")
    assert run_of("x.json").scores == tmp_path / "results/scores/x.parquet"


def test_without_outputs_and_resources_the_gates_are_shown_and_a_line_says_what_is_not(tmp_path):
    world = World()
    world.serve(noise=1.0)
    verdict, path = write(tmp_path, world)
    text = shown(path)
    assert verdict.verdict is Status.FAIL and "G-hard" in text
    assert f"The worst items cannot be shown: cannot read {tmp_path / 'outputs/x/0.parquet'}" in text


def test_the_limit_of_an_item_has_its_own_unit_beside_a_count_of_items(tmp_path):
    world = World()
    world.serve(noise=1.0)
    verdict, path = write(tmp_path, world)
    limit = next(gate.threshold.value for gate in verdict.gates if gate.id == "G-hard")
    hard, coverage = (
        next(line for line in shown(path).splitlines() if name in line and "│" in line)
        for name in ("│ G-hard", "│ G-coverage")
    )
    assert f"{limit:.3g} nat an item" in hard and "an item" not in coverage


@pytest.mark.parametrize("failed", [True, False])
def test_the_log_of_a_server_that_never_came_is_shown(tmp_path, failed):
    failure = StartupFailure(kind="exited", message="exit code 1", log_tail="RuntimeError: no such [layer]")
    came = {"startup": Startup(ready=False, failure=failure)} if failed else {}
    instances = (instance(0, ["served_0_alone", "served_0_load"], **came), instance(1, ["served_1_load"], **came))
    _, path = write(tmp_path, World(), instances=instances)
    if failed:  # as the workflow decides it: no judged output, so no gate
        store.write_json(path, store.read_json(path) | {"gates": []})
    assert ("RuntimeError: no such [layer]" in shown(path)) is failed


def test_the_devices_of_a_server_and_what_its_log_says_are_shown(tmp_path):
    said = Facts(statements={"attention main": "asked [x] → FLASH_ATTN (line 7)"}, unmatched=3)
    instances = (instance(0, ["served_0_alone"], devices=devices(), facts=said), instance(1, ["served_1_load"]))
    _, path = write(tmp_path, World(), instances=instances)
    first, second = shown(path).split("Server 1:")
    assert "  on AMD Instinct MI300X 0000:05:00.0, 0000:26:00.0\n" in first
    assert "  attention main: asked [x] → FLASH_ATTN (line 7)\n" in first
    assert "  and 3 log messages that no rule reads (results/facts/)\n" in first
    assert "  on " not in second and "attention" not in second and "no rule reads" not in second


def test_the_worst_speech_is_shown_with_what_was_asked_and_heard(tmp_path):
    run = SpeechRun(tmp_path)
    run.serve("item-01", np.zeros((1, 4_800)))
    path = run.publish()
    text = shown(path)
    panel = text[text.index("Worst items") :].split("╰")[0]
    assert "item-01" in panel and "G-catastrophe" in panel
    assert f"asked:     {run.texts['item-01']}" in panel
    assert "served:    nothing that is speech" in panel
    assert f"reference: {run.texts['item-01']}" in panel
    assert "0.2 s (reference 1.23)" in panel


def test_bytes_that_are_no_speech_are_shown_with_their_reason(tmp_path):
    run = SpeechRun(tmp_path)
    for arm in ("served_0_alone", "served_0_load", "served_1_load"):
        run.arms[arm]["item-04"]["audio"]["bytes"] = run.arms[arm]["item-04"]["audio"]["bytes"][:-100]
    assert "bytes of samples" in shown(run.publish())
