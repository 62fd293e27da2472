import asyncio
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from gpu import build, case
from sets import write_locked_set

from assay.canonical import canonical_json, sha256_file, sha256_text
from assay.client.transport import not_sent
from assay.config import load, read_yaml
from assay.devices import health
from assay.engines.plan import effective_options, serve_plan
from assay.engines.server import StartFailure
from assay.errors import ServerError, StoreError
from assay.generate import Outputs, generate
from assay.records import FailureKind, Status
from assay.store import read_json, read_provenance, read_rows, write_json
from assay.verdicts.decide import decide
from assay.verdicts.model import Coverage, Instance, Unscored

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "data" / "fake_server.py"
FAKE_MSTAR = ROOT / "tests" / "fake_mstar.py"
MSTAR = {
    "protocol": "mstar",
    "model": "m",
    "models": {"m": {"outputs": [{"format": "utf8"}], "sampling": {"max_tokens": ["max_output_tokens"]}}},
}
N_ITEMS = 20


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "item_id": f"item-{index:02d}",
            "set_id": "set_a",
            "modality": "text",
            "kind": "chat",
            "tags": [],
            "request": canonical_json({"messages": [{"role": "user", "content": str(index)}], "max_tokens": 4}),
            "expected": None,
            "prompt_tokens_ref": 3,
            "prompt_sha256": sha256_text(str(index)),
            "source": "test",
        }
        for index in range(N_ITEMS)
    ]
    write_locked_set(Path("a.parquet"), rows[:12])
    write_locked_set(Path("b.parquet"), rows[12:])
    return tmp_path


def outputs(folder):
    names = ("responses.parquet", "identity.json", "cleanup.json", "server.log", "devices.jsonl")
    return Outputs(*(folder / "out" / name for name in names))


def run(folder, *flags, instance=0, start_limit_s=20, send=None, fake=FAKE, client=None, **changes):
    """`generate` over a fake server; returns rows, identity, cleanup."""
    config = load(read_yaml(ROOT / "config" / "config.yaml"), ROOT / "config")
    plan = serve_plan(config, "smollm2_135m_embedded")
    plan["argv"] = [sys.executable, str(fake), "--port={port}", *map(str, flags)]
    plan["caches"] = {"hub": "resources/caches/hub"}
    plan["env"] = {"OMP_NUM_THREADS": "1", "HUB": "resources/caches/hub", "FAKE_API_KEY": "hush"}
    plan["env"] |= {"SOCKETS": "{instance_dir}/sockets", "SIDE": "{side_port_mesh}"}
    plan["side_ports"] = ["mesh"]
    plan["client"] = client or plan["client"] | {"stream": False, "logprobs": False}
    plan["limits"] = {"start_limit_s": start_limit_s, "stop_grace_s": 2}
    write_json("plan.json", plan | changes)
    written = outputs(folder)
    options = {} if send is None else {"send": send}
    generate(Path("plan.json"), [Path("a.parquet"), Path("b.parquet")], instance, written, **options)
    return read_rows(written.responses, "responses"), read_json(written.identity), read_json(written.cleanup)


def statuses(rows, arm):
    return [row["status"] for row in rows if row["arm"] == arm]


def test_a_clean_run_has_a_row_for_every_item_and_pass_and_proves_who_served(workspace):
    rows, identity, cleanup = run(workspace)
    assert {row["arm"] for row in rows} == {"served_0_alone", "served_0_load"}
    assert statuses(rows, "served_0_alone") == statuses(rows, "served_0_load") == ["ok"] * N_ITEMS
    assert {row["concurrency"] for row in rows if row["arm"] == "served_0_load"} == {16}
    assert cleanup["clean"] and cleanup["stopped_by"] == "SIGINT"

    start, end = identity["start"], identity["end"]
    assert identity["changed"] == [] and identity["died"] is None
    assert identity["startup"]["ready"] and identity["startup"]["failure"] is None
    assert start["pid"] == end["pid"] and start["listener_pids"] == [start["pid"]] and start["listener_is_ours"]
    assert start["argv"][:2] == [sys.executable, str(FAKE)] and start["cwd"] == str(workspace)
    assert start["env_set"]["HUB"] == "resources/caches/hub" and Path("resources/caches/hub").is_dir()
    assert start["env_set"]["FAKE_API_KEY"] == "(hidden)" and "hush" not in json.dumps(identity)
    assert start["version_route"] == {"status": "ok", "version": "9.9"}
    assert start["module_file"].endswith("assay/__init__.py") and start["packages"] > 20
    assert start["python"] == sys.version.split()[0]
    assert start["health"] == end["health"] == 200


def test_an_instance_has_a_folder_and_ports_of_its_own_and_leaves_none(workspace):
    found = [run(workspace, instance=number)[1]["start"]["env_set"] for number in (0, 1)]
    assert len({env["SOCKETS"] for env in found}) == len({env["SIDE"] for env in found}) == 2
    for env in found:
        assert env["SIDE"].isdigit() and env["SOCKETS"].endswith("/sockets")
        assert len(env["SOCKETS"]) < 60  # the path of a Unix socket has at most 107 characters
        assert not Path(env["SOCKETS"]).parent.exists()


def test_a_cache_is_cold_until_somebody_has_filled_it(workspace):
    assert run(workspace)[1]["startup"]["caches"] == {"hub": "cold"}
    assert run(workspace)[1]["startup"]["caches"] == {"hub": "cold"}  # an empty folder is no cache
    Path("resources/caches/hub/kernels").mkdir()
    Path("resources/caches/hub/kernels/gfx942.so").touch()
    assert run(workspace)[1]["startup"]["caches"] == {"hub": "warm"}


def test_a_server_from_another_checkout_fails_at_start_and_leaves_nothing(workspace):
    tree = {"name": "base", "path": str(workspace), "commit": None, "dirty": None}
    with pytest.raises(ServerError, match=r"'smollm2_135m_embedded': .*checkout 'base' .*takes module 'assay' from /"):
        run(workspace, tree=tree)
    assert read_json(outputs(workspace).cleanup)["clean"] and not outputs(workspace).responses.exists()
    here = Path(run(workspace)[1]["start"]["module_file"]).parents[1]
    assert run(workspace, tree=tree | {"path": str(here)})[1]["startup"]["ready"]


def test_an_arm_of_mstars_protocol_is_asked_in_it(workspace):
    rows, identity, cleanup = run(workspace, fake=FAKE_MSTAR, client=MSTAR)
    assert statuses(rows, "served_0_alone") == statuses(rows, "served_0_load") == ["ok"] * N_ITEMS
    assert {row["text"] for row in rows} == {"Good morning, Zoë!"}
    assert identity["startup"]["ready"] and identity["died"] is None and cleanup["clean"]


def test_a_server_of_mstars_protocol_that_fails_every_request_never_becomes_ready_though_healthy(workspace):
    rows, identity, cleanup = run(workspace, "--fault=http_500", start_limit_s=8, fake=FAKE_MSTAR, client=MSTAR)
    assert {row["status"] for row in rows} == {"not_sent"}
    assert "http_error: the conductor does not answer" in identity["startup"]["failure"]["message"]
    assert cleanup["clean"]


def test_a_server_of_mstars_protocol_that_dies_in_a_stream_breaks_that_answer_and_sends_no_more(workspace):
    rows, identity, _ = run(workspace, "--fault=dies", "--after=5", fake=FAKE_MSTAR, client=MSTAR)
    alone = statuses(rows, "served_0_alone")
    assert alone[:4] == ["ok"] * 4 and alone[4] == "stream_error"  # the probe was the first request
    assert set(alone[5:]) <= {"transport_error", "not_sent"} and set(statuses(rows, "served_0_load")) == {"not_sent"}
    assert identity["died"]["exit_code"] == 9


def test_an_extension_of_another_checkout_that_is_loaded_late_is_a_change(workspace, monkeypatch):
    found = iter([None, "it has loaded another"])
    monkeypatch.setattr("assay.generate.wrong_tree", lambda identity, plan: next(found))
    assert run(workspace)[1]["changed"] == ["native"]


def test_the_responses_carry_the_options_they_were_made_with(workspace):
    run(workspace)
    record = read_provenance(outputs(workspace).responses)
    plan = read_json("plan.json")
    assert record["options"] == effective_options(plan)
    assert record["inputs"] == {name: sha256_file(name) for name in ("plan.json", "a.parquet", "b.parquet")}
    assert (record["rule"], record["instance"]) == ("generate", 0)


def test_instance_1_walks_its_own_passes(workspace):
    rows, identity, _ = run(workspace, instance=1)
    assert {row["arm"] for row in rows} == {"served_1_load"} and len(rows) == N_ITEMS
    assert identity["instance"] == 1


def test_a_server_that_dies_while_loading_is_data(workspace):
    rows, identity, cleanup = run(workspace, "--die-loading")
    assert len(rows) == 2 * N_ITEMS and {row["status"] for row in rows} == {"not_sent"}
    assert "cannot find tensor lm_head.weight" in rows[0]["error"]
    failure = identity["startup"]["failure"]
    assert not identity["startup"]["ready"] and (failure["kind"], failure["exit_code"]) == ("exited", 1)
    assert identity["start"] is identity["end"] is identity["changed"] is identity["died"] is None
    assert cleanup["clean"] and cleanup["stopped_by"] == "exited"


def test_a_server_that_never_generates_is_data(workspace):
    rows, identity, cleanup = run(workspace, "--health-only", start_limit_s=5)
    assert len(rows) == 2 * N_ITEMS and {row["status"] for row in rows} == {"not_sent"}
    assert identity["startup"]["failure"]["kind"] == "not_ready"
    assert "the model is not loaded" in identity["startup"]["failure"]["message"]
    assert cleanup["clean"]


def test_a_server_that_dies_in_the_middle_costs_no_timeouts_and_no_rows(workspace):
    started = time.monotonic()
    rows, identity, cleanup = run(workspace, "--die-at-request", 10)  # one of them was the readiness probe
    assert time.monotonic() - started < 30
    alone, load = statuses(rows, "served_0_alone"), statuses(rows, "served_0_load")
    assert len(alone) == len(load) == N_ITEMS
    assert alone.count("ok") == 8 and {*alone, *load} <= {"ok", "transport_error", "not_sent"}
    assert "ok" not in load  # refused by the closed port until the death is seen, then not sent
    assert identity["died"]["exit_code"] == 7 and identity["died"]["log_tail"].endswith("out of memory")
    assert identity["died"]["message"] == "the server exited with code 7"
    assert identity["start"] is not None and identity["end"] is identity["changed"] is None
    assert (cleanup["stopped_by"], cleanup["exit_code"], cleanup["clean"]) == ("exited", 7, True)


def test_requests_that_hang_after_the_server_died_are_not_waited_for(workspace):
    async def send(plan, items, arm, concurrency, on_result=None):
        """Answers one item, kills the server's first process, and hangs as a worker that keeps the socket does."""
        port = int(plan.base_url.rpartition(":")[2])
        [row] = not_sent(items[:1], arm, "answered")
        on_result(row | {"status": "ok"})
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                os.kill(connection.pid, signal.SIGKILL)
        await asyncio.sleep(600)

    started = time.monotonic()
    rows, identity, _ = run(workspace, send=send)
    assert time.monotonic() - started < 30
    assert statuses(rows, "served_0_alone") == ["ok"] + ["not_sent"] * (N_ITEMS - 1)
    assert rows[2]["error"] == "the server exited with signal SIGKILL before this request was answered"
    assert identity["died"]["exit_code"] == -signal.SIGKILL


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_an_interrupt_stops_the_server_records_it_and_goes_on(workspace, number, kind, caplog):
    async def send(plan, items, arm, concurrency, on_result=None):
        seen.append(outputs(workspace).server_log.read_text())
        outputs(workspace).server_log.unlink()  # as Snakemake does with all that a job was to make
        os.kill(os.getpid(), number)
        await asyncio.sleep(600)

    seen = []
    with pytest.raises(kind), caplog.at_level("INFO"):
        run(workspace, send=send)
    assert read_json(outputs(workspace).cleanup)["clean"]
    assert not outputs(workspace).responses.exists()
    first, *_ = seen[0].splitlines()
    assert first in caplog.text.rpartition("the log of its server, until here:\n")[2]


def test_a_full_disk_is_one_clear_error_and_leaves_earlier_results(workspace, monkeypatch):
    run(workspace)
    before = outputs(workspace).responses.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(StoreError, match=r"responses\.parquet: No space left on device"):
        run(workspace)
    assert outputs(workspace).responses.read_bytes() == before
    assert not list(outputs(workspace).responses.parent.glob("*.partial"))


def test_an_unsupported_config_is_not_served(workspace):
    write_json("plan.json", {"config": "omni", "unsupported": "no speech machinery yet"})
    with pytest.raises(ServerError, match="'omni' is unsupported and cannot be served: no speech machinery yet"):
        generate(Path("plan.json"), [], 0, outputs(workspace))


def test_too_little_room_is_data_and_no_server_is_started(workspace):
    rows, identity, cleanup = run(workspace, needs={"disk_bytes": 2**52, "shm_bytes": None})
    assert {row["status"] for row in rows} == {"not_sent"} and cleanup["stopped_by"] == "not started"
    failure = identity["startup"]["failure"]
    assert failure["kind"] == "cannot_start" and "GiB free in" in failure["message"]


# --- devices ------------------------------------------------------------------------------------------------------

GB = 10**9
NO_FACTS = {"statements": {}, "unmatched": [], "otherwise": [], "refused": None}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight idle AMD devices (case 01), and processes on them are listed."""
    monkeypatch.setattr("assay.devices.hold.settle", partial(health.settle, every_s=0))
    found = build(case("01"), tmp_path / "machine", tools=False)
    (found.sysfs / "class/kfd/kfd/proc").mkdir(parents=True)
    return found


def memory_file(machine, index):
    return machine.pci(case("01")["expected"]["hip"][index]["bdf"]) / "mem_info_vram_used"


def on_devices(machine, gpus=2):
    """What a plan for some devices of `machine` says of them."""
    options = machine.options.model_copy(update={"settle_s": 0.0, "poll_s": 0.01})
    return {"gpus": gpus, "device": "amd", "device_options": options.model_dump(mode="json")}


def judged(folder, rows):
    """What is decided of one instance, by what its files say of the server."""
    written = outputs(folder)
    arms = ["served_0_alone", "served_0_load"]
    instance = Instance.measured(read_json(written.identity), read_json(written.cleanup), NO_FACTS, arms)
    failed = [Unscored(item_id=row["item_id"], arm=row["arm"], reason=row["error"]) for row in rows if row["error"]]
    coverage = Coverage(planned=len(rows), scored=len(rows) - len(failed), failed=failed)
    return decide(coverage=coverage, gates=[], instances=[instance])


def codes(decision):
    return {caveat.code for caveat in decision.caveats}


def test_a_run_whose_server_leaves_a_worker_behind_says_so_and_which(workspace, caplog):
    caplog.set_level("INFO")
    rows, _, cleanup = run(workspace, "--escape", "worker", "--die-at-request", 3)
    pid = Path("worker").read_text()
    assert cleanup["clean"] and [str(orphan["pid"]) for orphan in cleanup["orphans"]] == [pid]
    assert "workers outlived it and were ended" in caplog.text
    [caveat] = [caveat for caveat in judged(workspace, rows).caveats if caveat.code == "orphans"]
    assert f"(pid {pid} since 20" in caveat.detail


def test_a_server_on_devices_sees_those_that_are_leased_and_they_are_evidence(workspace, machine, monkeypatch):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "6,4")
    rows, identity, _ = run(workspace, **on_devices(machine))
    uuids = [one["uuid"] for one in identity["devices"]["leased"]]
    assert [one["index"] for one in identity["devices"]["leased"]] == [6, 4]
    assert identity["start"]["env_set"]["ROCR_VISIBLE_DEVICES"] == ",".join(uuids)
    assert identity["devices"]["during"]["looks"] and identity["devices"]["after"]["outcome"] == "pass"
    samples = outputs(workspace).devices.read_text().splitlines()
    assert len(samples) == 2 * identity["devices"]["during"]["looks"]
    assert codes(judged(workspace, rows)) == {"single_instance", "device_use"}  # it is the CPU that answered


def test_a_server_without_devices_has_no_evidence_of_any(workspace):
    rows, identity, _ = run(workspace)
    assert identity["devices"] is None and outputs(workspace).devices.read_bytes() == b""
    assert codes(judged(workspace, rows)) == {"single_instance"}


def test_unfit_devices_are_data_and_no_server_is_started(workspace, machine):
    for index in range(8):
        memory_file(machine, index).write_text(f"{90 * GB}\n")
    rows, identity, cleanup = run(workspace, **on_devices(machine))
    assert len(rows) == 2 * N_ITEMS and {row["status"] for row in rows} == {"not_sent"}
    assert "90.0 GB in use" in rows[0]["error"]
    failure = identity["startup"]["failure"]
    assert (failure["kind"], failure["exit_code"], failure["log_tail"]) == ("devices_unfit", None, "")
    assert identity["devices"] is None and not identity["startup"]["ready"]
    assert (cleanup["stopped_by"], cleanup["clean"], cleanup["leftover"]) == ("not started", True, [])
    assert outputs(workspace).server_log.read_bytes() == outputs(workspace).devices.read_bytes() == b""
    decision = judged(workspace, rows)
    assert decision.status is Status.ERROR
    assert "had no devices fit to measure on" in decision.reason and "90.0 GB in use" in decision.reason


def test_an_engine_that_cannot_be_asked_for_old_containers_is_data_too(workspace, monkeypatch):
    def clear_up(plan):
        raise StartFailure(FailureKind.ENGINE_UNREACHABLE, "no engine answers")

    run(workspace)
    monkeypatch.setattr("assay.generate.clear_up", clear_up)
    rows, identity, cleanup = run(workspace)
    assert identity["startup"]["failure"]["kind"] == "engine_unreachable" and cleanup["stopped_by"] == "not started"
    assert outputs(workspace).server_log.read_bytes() == outputs(workspace).devices.read_bytes() == b""
    assert judged(workspace, rows).status is Status.ERROR


def joined_by(machine, *pids):
    """A client that lets the server, and other processes, use device 0 in the middle of a pass."""

    async def send(plan, items, arm, concurrency, on_result=None):
        port = int(plan.base_url.rpartition(":")[2])
        (server,) = {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }
        gpu_id = next(node["gpu_id"] for node in case("01")["sysfs"]["kfd_nodes"] if node["gpu_id"])
        for pid in (server, *pids):
            machine.compute(pid, {gpu_id: GB})
        written = Path("out/devices.jsonl")
        while len(written.read_text().splitlines()) < 20:
            await asyncio.sleep(0.01)
        count = len(written.read_text().splitlines())
        while len(written.read_text().splitlines()) < count + 4:
            await asyncio.sleep(0.01)
        return [row | {"status": "ok", "error": None} for row in not_sent(items, arm, "answered")]

    return send


@pytest.mark.parametrize(("pids", "found"), [((), set()), ((2**22 + 1,), {"co_tenant"})])
def test_a_stranger_on_the_devices_is_a_caveat_and_the_server_itself_is_none(workspace, machine, pids, found):
    rows, identity, _ = run(workspace, send=joined_by(machine, *pids), **on_devices(machine, gpus=1))
    assert tuple(one["pid"] for one in identity["devices"]["during"]["strangers"]) == pids
    assert codes(judged(workspace, rows)) - {"single_instance"} == found


def test_memory_that_a_run_leaves_in_use_is_an_error_that_names_the_device(workspace, machine, monkeypatch):
    monkeypatch.setattr("assay.devices.hold.RETURN_S", 0)

    async def send(plan, items, arm, concurrency, on_result=None):
        memory_file(machine, 1).write_text(f"{90 * GB}\n")
        return [row | {"status": "ok", "error": None} for row in not_sent(items, arm, "answered")]

    rows, _, cleanup = run(workspace, send=send, **on_devices(machine))
    decision = judged(workspace, rows)
    assert cleanup["clean"] and decision.status is Status.ERROR
    assert (
        "instance 0 did not leave its devices as they were: memory_returned on HIP 1 (0000:26:00.0)" in decision.reason
    )


def test_devices_of_a_server_that_never_comes_are_looked_at_after_it(workspace, machine):
    _, identity, cleanup = run(workspace, "--die-loading", **on_devices(machine))
    assert identity["startup"]["failure"]["kind"] == "exited" and cleanup["stopped_by"] == "exited"
    assert identity["devices"]["after"]["outcome"] == "pass"


def test_an_interrupt_does_not_wait_for_memory_to_come_back(workspace, machine, monkeypatch):
    monkeypatch.setattr("assay.devices.hold._after", lambda *_: pytest.fail("it is looked for"))

    async def send(plan, items, arm, concurrency, on_result=None):
        memory_file(machine, 0).write_text(f"{90 * GB}\n")
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        run(workspace, send=send, **on_devices(machine))
    assert read_json(outputs(workspace).cleanup)["clean"]


def test_a_pass_that_says_whether_it_is_streamed_is_sent_so(workspace):
    seen = {}

    async def send(plan, items, arm, concurrency, on_result=None):
        seen[arm] = plan.stream
        return not_sent(items, arm, "only looked at")

    passes = [{"name": "as_the_arm", "concurrency": 1}, {"name": "streamed", "concurrency": 1, "stream": True}]
    run(workspace, send=send, instances=[passes])
    assert seen == {"served_0_as_the_arm": False, "served_0_streamed": True}
