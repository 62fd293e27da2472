"""Work on leased devices: under the mask of its lease alone, in a process that leaves nothing, and on record."""

import logging
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from gpu import build, case
from processes import wait_until

from assay.borrow import on_devices
from assay.devices import discovery, health
from assay.devices import hold as rooms
from assay.devices.lease import lease
from assay.errors import AssayError, DeviceError, SampleError
from assay.store import read_provenance, read_rows, table_from_rows, write_table

ROCR = "ROCR_VISIBLE_DEVICES"
GB = 10**9


class Borrowing:
    """Eight idle AMD devices (case 01), and a table to compute on one of them."""

    def __init__(self, folder):
        content = case("01")
        self.machine = build(content, folder, tools=False)
        (self.machine.sysfs / "class/kfd/kfd/proc").mkdir(parents=True)
        self.ids = [node["gpu_id"] for node in content["sysfs"]["kfd_nodes"] if node["gpu_id"]]
        self.uuids = [f"GPU-{card['unique_id']}" for card in content["sysfs"]["drm"] if card.get("unique_id")]
        self.pci = [one["bdf"] for one in content["expected"]["hip"]]
        self.output, self.samples = folder / "out/table.parquet", folder / "out/devices.jsonl"
        options = self.machine.options.model_copy(update={"settle_s": 0.0, "poll_s": 0.01})
        self.want = {"gpus": 1, "device": "amd", "device_options": options.model_dump(mode="json")}

    def use(self, index, memory):
        (self.machine.pci(self.pci[index]) / "mem_info_vram_used").write_text(f"{memory}\n")

    def looks(self):
        return len(self.samples.read_text().splitlines())

    def write(self, *facts):
        rows = [{"gate": "g", "metric": "m", "item_id": fact, "arm": "a", "value": 0.0} for fact in facts]
        write_table(self.output, "floor", table_from_rows("floor", rows), {"rule": "judge"})

    def run(self, work, **changes):
        on_devices(self.want | changes, self.samples, self.output, work)

    def free(self):
        """Whether nobody leases the first device."""
        node = discovery.discover("amd", self.machine.options)
        with lease(node.pick([0]), 1, self.machine.options.lock_dir, 0, "y"):
            return True


@pytest.fixture
def borrowing(tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "settle", partial(health.settle, every_s=0))
    monkeypatch.setattr(rooms, "LOOK_S", 0.01)
    monkeypatch.setattr(rooms, "RETURN_S", 0.05)
    return Borrowing(tmp_path)


def test_work_sees_the_leased_device_alone_and_its_table_says_which(borrowing, monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2")

    def work():
        pid, before = os.getpid(), borrowing.looks()
        borrowing.machine.compute(pid, {borrowing.ids[2]: GB})
        assert wait_until(lambda: borrowing.looks() > before + 2)
        borrowing.write(os.environ[ROCR], str(os.environ.get("HIP_VISIBLE_DEVICES")), str(pid))

    borrowing.run(work)
    rows = [row["item_id"] for row in read_rows(borrowing.output, "floor")]
    assert set(rows) >= {borrowing.uuids[2], "None"} and str(os.getpid()) not in rows
    assert ROCR not in os.environ
    record = read_provenance(borrowing.output)
    assert record["rule"] == "judge" and [one["index"] for one in record["devices"]["leased"]] == [2]
    assert record["devices"]["before"]["outcome"] == record["devices"]["after"]["outcome"] == "pass"
    during = record["devices"]["during"]
    assert (during["strangers"], during["unused"], during["astray"]) == ([], [], [])
    assert borrowing.free()


def test_work_of_a_site_without_devices_is_done_here_and_now(borrowing):
    borrowing.run(lambda: borrowing.write(str(os.getpid())), gpus=0)
    assert [row["item_id"] for row in read_rows(borrowing.output, "floor")] == [str(os.getpid())]
    assert "devices" not in read_provenance(borrowing.output) and not borrowing.samples.exists()


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("work", "said", "told"),
    [
        (partial(fail, SampleError("the set is wrong")), "the set is wrong", "failed; what it said stands above"),
        (partial(fail, ZeroDivisionError()), "this is a fault in Assay", "failed; what it said stands above"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), None, "ended by SIGKILL; .*out of memory"),
    ],
)
def test_work_that_fails_is_one_error_and_gives_its_device_back(borrowing, capfd, work, said, told):
    logging.basicConfig(force=True)  # to stderr, which the child shares
    with pytest.raises(AssayError, match=told):
        borrowing.run(work)
    assert said is None or said in capfd.readouterr().err
    assert borrowing.free()


def test_work_does_not_begin_where_no_device_is_fit(borrowing):
    for index in range(8):
        borrowing.use(index, 90 * GB)
    with pytest.raises(DeviceError, match=r"did not become free"):
        borrowing.run(lambda: borrowing.write("never"))
    assert not borrowing.output.exists()


def test_a_table_whose_devices_had_faults_is_not_kept(borrowing):
    def work():
        borrowing.write("x")
        with Path(borrowing.machine.options.kernel_log).open("a") as log:
            log.write(f"3,9,77,-;amdgpu {borrowing.pci[0]}: amdgpu: GPU reset begin!\n")

    with pytest.raises(DeviceError, match=r"table\.parquet was computed on had faults meanwhile: .*GPU reset begin"):
        borrowing.run(work)
    assert not borrowing.output.exists() and borrowing.free()


def test_a_table_that_left_memory_behind_on_its_device_is_not_kept(borrowing):
    def work():
        borrowing.write("x")
        borrowing.use(0, 90 * GB)

    with pytest.raises(DeviceError, match=r"are not as before: HIP 0 .*memory_returned"):
        borrowing.run(work)
    assert not borrowing.output.exists()


def test_work_ends_with_the_process_that_leases_for_it(borrowing, tmp_path):
    note = tmp_path / "pid"

    def work():
        note.write_text(str(os.getpid()))
        time.sleep(600)

    owner = multiprocessing.get_context("fork").Process(target=borrowing.run, args=(work,))
    owner.start()
    assert wait_until(lambda: note.exists() and note.read_text())
    worker = psutil.Process(int(note.read_text()))
    owner.kill()
    owner.join()
    assert wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    assert borrowing.free()
