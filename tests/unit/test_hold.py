"""Devices around a server: leased and judged before it, watched during it, compared after it."""

import json
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from gpu import Machine, build, case
from processes import wait_until

from assay.config import DeviceOptions, HealthLimits
from assay.devices import discovery, health
from assay.devices import hold as rooms
from assay.devices.hold import Held, hold
from assay.devices.lease import lease
from assay.devices.model import Reading
from assay.devices.watch import Watch
from assay.engines.server import StartFailure
from assay.errors import DeviceError

ROCR = "ROCR_VISIBLE_DEVICES"
GB = 10**9
STRANGER = 666


@dataclass
class Bench:
    """A machine with eight idle AMD devices (case 01), and plans for it."""

    machine: Machine
    looks: int = 0  # whole ones: those of the watch are not counted
    fault: str | None = None  # why a look gives no answer

    def __post_init__(self):
        content = case("01")
        self.ids = [node["gpu_id"] for node in content["sysfs"]["kfd_nodes"] if node["gpu_id"]]
        self.uuids = [f"GPU-{card['unique_id']}" for card in content["sysfs"]["drm"] if card.get("unique_id")]
        self.pci = [one["bdf"] for one in content["expected"]["hip"]]
        self.samples = self.machine.root / "out/devices.jsonl"
        self.lists_processes()

    def lists_processes(self):
        (self.machine.sysfs / "class/kfd/kfd/proc").mkdir(parents=True)

    def plan(self, gpus=2, **options):
        changes = {"settle_s": 0.0, "poll_s": 0.01} | options
        chosen = DeviceOptions.model_validate(self.machine.options.model_dump() | changes)
        return {"gpus": gpus, "device": "amd", "device_options": chosen.model_dump(mode="json"), "config": "x"}

    def hold(self, base=None, **options):
        return hold(self.plan(**options), base or {}, self.samples)

    def use(self, index, memory):
        """Let device `index` have so much memory in use."""
        (self.machine.pci(self.pci[index]) / "mem_info_vram_used").write_text(f"{memory}\n")

    @property
    def log(self):
        return Path(self.machine.options.kernel_log)

    def memory(self, index):
        return int((self.machine.pci(self.pci[index]) / "mem_info_vram_used").read_text())

    def come(self, pid, index):
        """Let a process come onto device `index`."""
        self.machine.compute(pid, {self.ids[index]: GB})

    def sampled(self):
        return [json.loads(line) for line in self.samples.read_text().splitlines()]

    def saw(self, count=1):
        """Wait for so many more looks of the watch that began after now."""
        start = len(self.sampled())
        assert wait_until(lambda: len(self.sampled()) >= start + 2 * (count + 1))


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "settle", partial(health.settle, every_s=0))
    monkeypatch.setattr(rooms, "LOOK_S", 0.01)
    found = Bench(build(case("01"), tmp_path, tools=False))

    def discover(vendor, options, need=None):
        if found.fault:
            raise DeviceError(found.fault)
        found.looks += need is None
        return discovery.discover(vendor, options, *([] if need is None else [need]))

    monkeypatch.setattr(rooms, "discover", discover)
    return found


class Process:
    """A process as far as its id."""

    def __init__(self, pid):
        self.pid = pid


class Tree:
    """A server of these processes."""

    def __init__(self, *pids):
        self.pids = set(pids)

    def processes(self):
        return {Process(pid) for pid in self.pids}


def leased(held):
    return [one["index"] for one in held.evidence["leased"]]


def gates(report, outcome):
    return {check["gate"]: check["device"] for check in report["checks"] if check["outcome"] == outcome}


# --- before -------------------------------------------------------------------------------------------------------


def test_the_first_devices_that_are_free_are_ours_for_as_long_as_the_block_lasts(bench):
    bench.use(0, 90 * GB)
    with bench.hold() as held:
        node = discovery.discover("amd", bench.machine.options)
        assert [device.index for device in held.devices] == [1, 2]
        assert held.env == {ROCR: f"{bench.uuids[1]},{bench.uuids[2]}"}
        with (
            pytest.raises(DeviceError, match=r"leased by pid .* for x since"),
            lease(node.pick([1]), 1, bench.machine.options.lock_dir, 0, "y"),
        ):
            pass
    with lease(node.pick([1]), 1, bench.machine.options.lock_dir, 0, "y"):
        pass
    assert held.evidence["leased"][0] == {
        "index": 1,
        "pci": bench.pci[1],
        "uuid": bench.uuids[1],
        "name": "AMD Instinct MI300X",
        "tool_index": 1,
    }
    assert held.evidence["before"]["outcome"] == held.evidence["after"]["outcome"] == "pass"
    assert json.loads(json.dumps(held.evidence)) == held.evidence


def test_only_devices_that_the_job_was_given_are_leased(bench):
    with bench.hold({ROCR: "5,3"}) as held:
        assert leased(held) == [5, 3]
        assert held.env == {ROCR: f"{bench.uuids[5]},{bench.uuids[3]}"}
    with pytest.raises(DeviceError, match="set at once"), bench.hold({ROCR: "5", "HIP_VISIBLE_DEVICES": "0"}):
        pytest.fail("it was held")


def test_devices_that_never_become_free_are_an_error_and_nothing_begins(bench):
    for index in range(7):
        bench.use(index, 90 * GB)
    with pytest.raises(DeviceError, match=r"2 of .* did not become free .*busy: 90\.0 GB in use"), bench.hold():
        pytest.fail("it was held")
    assert not bench.samples.exists()


def test_free_devices_in_the_wrong_state_are_an_error_and_are_let_go(bench):
    wrong = HealthLimits(partition_modes=["CPX/NPS4"])
    why = r"not fit.*\n.*HIP 0 .*partition_mode: refuse: SPX/NPS1"
    with pytest.raises(DeviceError, match=why), bench.hold(limits=wrong):
        pytest.fail("it was held")
    assert not bench.samples.exists()
    with bench.hold() as held:
        assert leased(held) == [0, 1]


# --- during -------------------------------------------------------------------------------------------------------


def test_a_stranger_on_our_devices_is_evidence_and_one_elsewhere_is_not(bench):
    with bench.hold() as held:
        held.belong_to(Tree(100))
        bench.come(100, 0)
        bench.saw()
        bench.come(777, 5)
        bench.saw()
        assert held.evidence.keys() == {"leased", "before"}
        bench.come(STRANGER, 1)
        bench.saw()
    (stranger,) = held.evidence["during"]["strangers"]
    assert (stranger["pid"], stranger["device"], stranger["memory"]) == (STRANGER, f"HIP 1 ({bench.pci[1]})", GB)
    assert held.evidence["during"]["looks"] >= 6 and held.evidence["during"]["failed"] == []
    assert held.evidence["during"]["blind"] == []
    assert any(sample["strangers"] for sample in bench.sampled())


def test_where_our_processes_were_is_held_against_what_is_leased(bench):
    with bench.hold() as held:
        held.belong_to(Tree(100))
        bench.come(100, 1)
        bench.come(100, 6)
        bench.come(777, 0)
        bench.saw()
    names = [f"HIP {index} ({bench.pci[index]})" for index in range(8)]
    assert (held.evidence["during"]["astray"], held.evidence["during"]["unused"]) == ([names[6]], [names[0]])
    with bench.hold() as held:
        held.belong_to(Tree(200))
        for index in (2, 3):  # 0 and 1 are somebody's now
            bench.come(200, index)
        bench.saw()
    assert held.evidence["during"]["astray"] == held.evidence["during"]["unused"] == []


def test_a_process_of_ours_that_ended_is_no_stranger_for_as_long_as_the_driver_lists_it(bench):
    tree = Tree(100, 101)
    with bench.hold() as held:
        held.belong_to(tree)
        bench.come(100, 0)
        bench.come(101, 1)
        bench.saw()
        tree.pids = set()
        bench.saw()
        held.belong_to(Tree(200))  # the server of another attempt
        bench.come(200, 0)
        bench.saw()
    assert held.evidence["during"]["strangers"] == []


def test_what_the_last_look_sees_is_evidence_too(bench, monkeypatch):
    @contextmanager
    def late(*_):
        seen = Watch()
        yield seen
        seen.looks += 1
        seen.blind.add("HIP 0")

    monkeypatch.setattr(rooms, "watch", late)
    with bench.hold() as held:
        pass
    assert (held.evidence["during"]["looks"], held.evidence["during"]["blind"]) == (1, ["HIP 0"])


def test_looks_that_fail_alike_are_told_once(bench):
    with bench.hold() as held:
        bench.fault = "the sensor is gone"
        assert wait_until(lambda: len([one for one in bench.sampled() if "error" in one]) > 2)
        bench.fault = None
        bench.saw()
    assert held.evidence["during"]["failed"] == ["the sensor is gone"]
    assert held.evidence["after"]["outcome"] == "pass"


def test_a_machine_that_lists_no_processes_is_said_to_hide_strangers(bench):
    (bench.machine.sysfs / "class/kfd/kfd/proc").rmdir()
    with bench.hold() as held:
        bench.saw()
    assert held.evidence["during"]["blind"] == [f"HIP {index} ({bench.pci[index]})" for index in (0, 1)]
    assert held.evidence["during"]["unused"] == []  # who knows
    assert held.evidence["before"]["outcome"] == "warn"
    assert gates(held.evidence["before"], "unknown").keys() >= {"co_tenant"}


def test_what_gates_and_the_kernel_say_while_a_server_runs_is_evidence(bench):
    with bench.hold() as held:
        bench.saw()
    assert held.evidence["during"]["health"]["outcome"] == "pass"
    with bench.hold() as held:
        bench.saw()
        (bench.machine.pci(bench.pci[1]) / "current_compute_partition").write_text("CPX\n")
        bench.saw()
        (bench.machine.pci(bench.pci[1]) / "current_compute_partition").write_text("SPX\n")
        with bench.log.open("a") as log:
            log.write(f"3,9,77,-;amdgpu {bench.pci[0]}: amdgpu: GPU reset begin!\n")
    assert held.evidence["during"]["health"]["outcome"] == "refuse"
    name = f"HIP 1 ({bench.pci[1]})"
    assert gates(held.evidence["during"]["health"], "refuse") == {"partition_mode": name, "kernel_log": "all"}
    assert held.evidence["before"]["outcome"] == "pass"


def test_tools_are_asked_once_a_minute_while_a_server_runs(bench, monkeypatch):
    asked = []
    real = rooms.discover

    def discover(vendor, options, need=None):
        asked.append(need)
        return real(vendor, options, need)

    monkeypatch.setattr(rooms, "discover", discover)
    with bench.hold():
        bench.saw(3)
    running = [need for need in asked if need == () or Reading.THROTTLE in (need or ())]
    assert running[0] == rooms.TOLD_WHILE_RUNNING and set(running[1:]) == {()}


# --- after --------------------------------------------------------------------------------------------------------


def test_memory_that_does_not_come_back_names_its_device(bench, monkeypatch):
    monkeypatch.setattr(rooms, "RETURN_S", 0.03)
    with bench.hold() as held:
        bench.use(1, 90 * GB)
    assert held.evidence["after"]["outcome"] == "refuse"
    assert gates(held.evidence["after"], "refuse") == {"memory_returned": f"HIP 1 ({bench.pci[1]})"}


def test_memory_that_comes_back_late_is_waited_for(bench, monkeypatch):
    before = bench.memory(1)
    real = rooms.compare

    def compare(*arguments):
        report = real(*arguments)
        if bench.looks >= ended + 3:
            bench.use(1, before)
        return report

    monkeypatch.setattr(rooms, "compare", compare)
    with bench.hold() as held:
        bench.use(1, 90 * GB)
        ended = bench.looks
    assert held.evidence["after"]["outcome"] == "pass" and bench.looks == ended + 4


def test_memory_that_cannot_be_read_after_a_run_is_a_warning(bench):
    with bench.hold() as held:
        (bench.machine.pci(bench.pci[1]) / "mem_info_vram_used").unlink()
    assert held.evidence["after"]["outcome"] == "warn"
    assert gates(held.evidence["after"], "unknown")["memory_returned"] == f"HIP 1 ({bench.pci[1]})"


def test_a_device_that_is_gone_after_a_run_is_told_and_hides_no_run(bench):
    with bench.hold() as held:
        bench.fault = "the driver is gone"
    after = held.evidence["after"]
    assert (after["outcome"], after["checks"], after["error"]) == ("refuse", [], "the driver is gone")


def test_a_server_that_fails_is_compared_too(bench):
    with pytest.raises(StartFailure), bench.hold() as held:
        raise StartFailure("exited", "the server exited with code 1")
    assert held.evidence["after"]["outcome"] == "pass" and held.evidence["during"]["looks"] >= 1


def test_an_interrupt_lets_go_at_once(bench, monkeypatch):
    monkeypatch.setattr(rooms, "RETURN_S", 0)
    with pytest.raises(KeyboardInterrupt), bench.hold() as held:
        bench.use(1, 90 * GB)
        looks = bench.looks
        raise KeyboardInterrupt
    assert bench.looks == looks and "after" not in held.evidence
    bench.use(1, 0)
    with bench.hold() as held:
        assert leased(held) == [0, 1]


# --- without devices ----------------------------------------------------------------------------------------------


def test_a_server_without_devices_leaves_an_empty_file_of_samples_and_no_evidence(bench):
    bench.samples.parent.mkdir()
    bench.samples.write_text("of an earlier run\n")
    with hold({"gpus": 0, "device": "cpu", "device_options": None}, {ROCR: "0"}, bench.samples) as held:
        assert held == Held()
    assert bench.samples.read_text() == "" and held.evidence is None and bench.looks == 0
