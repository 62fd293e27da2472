"""Leases: one job a PCI device, all or none, and gone with whoever held them."""

import errno
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from assay.devices.lease import Lease, lease, lock_path
from assay.devices.model import Device, Known, Vendor
from assay.errors import DeviceError

JOBS, DEVICES = 50, 4


def fake(index, pci=None, partition=0):
    return Device(
        vendor=Vendor.AMD,
        index=index,
        pci=pci or f"0000:{index + 1:02x}:00.0",
        partition=partition,
        uuid=None if partition else f"GPU-{index + 1:016x}",
        tool_index=Known(index, "test"),
        readings={},
    )


def devices(count=DEVICES):
    return [fake(index) for index in range(count)]


def job(take, folder, number, count, hold_s, start):
    """A process: takes devices, makes a mark for each that must not be there yet, and says what it held when."""
    start.wait(120)
    with take(devices(), count, folder / "locks", 120, f"job {number}") as ours:
        since = time.monotonic()
        marks = [folder / f"{device.index}.mark" for device in ours.devices]
        for mark in marks:
            mark.touch(exist_ok=False)
        time.sleep(hold_s)
        for mark in marks:
            mark.unlink()
        spans = [[device.index, since, time.monotonic()] for device in ours.devices]
    (folder / f"{number}.json").write_text(json.dumps(spans))


def run(take, folder, jobs, hold_s):
    """Run many jobs that start as one: their exit statuses, and what they held when."""
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(jobs)
    processes = [
        fork.Process(target=job, args=(take, folder, number, 1 + number % 3, hold_s, start)) for number in range(jobs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes], [json.loads(path.read_text()) for path in folder.glob("*.json")]


def overlaps(spans):
    """Pairs of spans (device, start, end) on one device that overlap."""
    pairs = itertools.pairwise(sorted(spans))
    return [(first, second) for first, second in pairs if first[0] == second[0] and second[1] < first[2]]


def test_fifty_jobs_on_four_devices_never_overlap_and_all_get_their_turn(tmp_path):
    codes, held = run(lease, tmp_path, JOBS, hold_s=0.02)
    assert codes == [0] * JOBS
    assert sorted(map(len, held)) == sorted(1 + number % 3 for number in range(JOBS))
    assert {span[0] for spans in held for span in spans} == set(range(DEVICES))
    assert overlaps(span for spans in held for span in spans) == []


@contextmanager
def no_lease(candidates, count, *_):
    yield Lease(tuple(candidates[:count]), {})


def test_jobs_that_lease_nothing_are_seen_to_overlap(tmp_path, capfd):
    codes, _ = run(no_lease, tmp_path, 8, hold_s=2)
    assert any(codes) and "FileExistsError" in capfd.readouterr().err
    assert overlaps([(0, 1.0, 2.0), (0, 1.9, 3.0), (1, 1.0, 9.0)]) == [((0, 1.0, 2.0), (0, 1.9, 3.0))]
    assert overlaps([(0, 1.0, 2.0), (0, 2.0, 3.0), (1, 1.5, 2.5)]) == []


HOLD = """
import os, sys, time
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from test_lease import devices
from assay.devices.lease import lease
with lease(devices(), 4, sys.argv[2], 0, "job"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_holder_frees_its_lease_and_its_note_is_not_believed(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "workflow")}
    command = [sys.executable, "-c", HOLD, __file__, str(tmp_path / "locks")]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert job.stdout.readline() == "held\n"
    with (
        pytest.raises(DeviceError, match=rf"within 0 s: HIP 0 .* is leased by pid {job.pid} of .* for job since"),
        lease(devices(), 1, tmp_path / "locks", 0, "other"),
    ):
        pass
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    before = time.monotonic()
    with lease(devices(), DEVICES, tmp_path / "locks", 5, "other") as ours:
        assert len(ours.devices) == DEVICES and time.monotonic() - before < 5
        assert json.loads(note(tmp_path, 0).read_text())["pid"] == os.getpid()
    assert not note(tmp_path, 0).exists()


def note(folder, index):
    return lock_path(folder / "locks", devices()[index].pci).with_suffix(".json")


def test_the_first_free_devices_are_taken_in_the_order_of_the_candidates(tmp_path):
    first, second, third, _ = devices()
    with lease([first], 1, tmp_path, 0, "a"), lease([third, first, second], 2, tmp_path, 0, "b") as ours:
        assert ours.devices == (third, second)
        assert ours.env == {"ROCR_VISIBLE_DEVICES": f"{third.uuid},{second.uuid}"}


def test_it_is_all_or_none(tmp_path):
    first, second, *_ = devices()
    with lease([first], 1, tmp_path, 0, "a"):
        with (
            pytest.raises(DeviceError, match=r"2 of .* did not become free within 0\.1 s.*HIP 1 .* is free"),
            lease([second, first], 2, tmp_path, 0.1, "b"),
        ):
            pass
        with lease([second], 1, tmp_path, 0, "c"):  # it was let go of
            pass


def test_a_lease_ends_with_its_block_also_by_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), lease(devices(), 4, tmp_path, 0, "a"):
        raise ZeroDivisionError
    with lease(devices(), 4, tmp_path, 0, "b"):
        pass


def test_partitions_of_one_pci_device_are_leased_together(tmp_path):
    pci = "0000:05:00.0"
    parts = [fake(index, pci, partition=index) for index in range(4)]
    with lease(parts[:1], 1, tmp_path, 0, "a"):
        with pytest.raises(DeviceError, match="did not become free"), lease(parts[1:], 1, tmp_path, 0, "b"):
            pass
        with lease([*parts, fake(9)], 1, tmp_path, 0, "c") as ours:
            assert [device.index for device in ours.devices] == [9]
    with lease(parts, 3, tmp_path, 0, "d") as ours:  # one lock, three devices
        assert [device.index for device in ours.devices] == [0, 1, 2]


@pytest.mark.parametrize("count", [0, 5])
def test_more_than_there_are_is_refused_at_once(tmp_path, count):
    with (
        pytest.raises(DeviceError, match=f"{count} devices are wanted and 4 will do"),
        lease(devices(), count, tmp_path, 99, "a"),
    ):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DeviceError, match=r"cannot lock .*file.*devices\.lock_dir"),
        lease(devices(), 1, tmp_path / "file/locks", 0, "a"),
    ):
        pass


def test_a_site_without_a_place_for_leases_is_told_what_to_set():
    with pytest.raises(DeviceError, match=r"set devices\.lock_dir"), lease(devices(), 1, None, 0, "a"):
        pass


def test_a_device_that_is_not_fit_is_passed_over_and_left_to_others(tmp_path):
    def unfit(device):
        return "busy: x" if device.index == 0 else None

    with lease(devices(), 2, tmp_path, 0, "a", unfit) as ours:
        assert [device.index for device in ours.devices] == [1, 2]
        with lease(devices()[:1], 1, tmp_path, 0, "b"):
            pass


def test_a_job_of_ours_is_queued_behind_for_longer_than_devices_that_are_not_fit_are_waited_for(tmp_path, monkeypatch):
    """With one device, the second instance of a config waits for as long as the first takes."""
    monkeypatch.setattr("assay.devices.lease.RETRY_S", 0.02)
    (only,) = devices(1)
    started = time.monotonic()
    with (
        pytest.raises(DeviceError, match=r"within 0 s: HIP 0 .* is busy"),
        lease([only], 1, tmp_path, 600, "a", lambda _: "busy", 0),
    ):
        pass
    assert time.monotonic() - started < 60
    with ExitStack() as first:
        first.enter_context(lease([only], 1, tmp_path, 0, "a"))
        threading.Timer(2, first.close).start()
        looked = iter(["its memory is not back yet"])
        with lease([only], 1, tmp_path, 600, "b", lambda _: next(looked, None), 1.5) as second:
            assert second.devices == (only,) and time.monotonic() - started >= 2
    with (
        lease([only], 1, tmp_path, 0, "a"),
        pytest.raises(DeviceError, match=r"within 0\.1 s: HIP 0 .* is leased"),
        lease([only], 1, tmp_path, 0.1, "b", unfit_s=600),
    ):
        pass


def test_a_file_system_without_kernel_locks_is_refused(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(DeviceError, match="cannot lock"), lease(devices(), 1, tmp_path, 0, "a"):
        pass


def test_the_place_may_use_environment_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKS", str(tmp_path / "there"))
    with lease(devices(), 1, "$LOCKS", 0, "a"):
        assert list((tmp_path / "there").glob("*.lock"))
