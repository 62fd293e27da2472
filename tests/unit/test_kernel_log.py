"""What the kernel says of devices: only new messages, only of ours, and each kind at its weight."""

import pytest
from gpu import build, case

from assay.devices import amd
from assay.devices.health import Outcome
from assay.devices.kernel_log import faults, kernel_log

OURS, OTHER = "0000:05:00.0", "0000:26:00.0"
RECORD = "3,{},77,-;{}\n SUBSYSTEM=pci\n"


@pytest.fixture(scope="module")
def devices(tmp_path_factory):
    node = amd.discover(build(case("01"), tmp_path_factory.mktemp("x"), tools=False).options)
    assert [device.pci for device in node.devices[:2]] == [OURS, OTHER]
    return node.devices[:1]


def judged(devices, *messages):
    (check,) = faults(list(messages), devices, "the log")
    return check


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        (f"amdgpu {OURS}: amdgpu: GPU reset begin!", Outcome.REFUSE),
        (f"amdgpu {OURS}: amdgpu: VRAM is lost due to GPU reset!", Outcome.REFUSE),
        (f"amdgpu {OURS}: amdgpu: 2 uncorrectable hardware errors detected in umc block", Outcome.REFUSE),
        ("[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring comp_1.0.0 timeout, signaled seq=5", Outcome.REFUSE),
        (f"amdgpu {OURS}: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:24)", Outcome.WARN),
        ("NVRM: Xid (PCI:0000:05:00): 79, pid=1, GPU has fallen off the bus.", Outcome.REFUSE),
        ("NVRM: Xid (PCI:0000:05:00): 48, Double Bit ECC Error", Outcome.REFUSE),
        ("NVRM: Xid (PCI:0000:05:00): 13, Graphics Exception: ESR 0x404600", Outcome.WARN),
        (f"amdgpu {OURS}: amdgpu: SMU is initialized successfully!", Outcome.PASS),
        ("traps: python[7] general protection fault ip:7f0 sp:7f1 error:0 in libc.so.6", Outcome.PASS),
        ("usb 1-1: new high-speed USB device", Outcome.PASS),
        (f"amdgpu {OTHER}: amdgpu: GPU reset begin!", Outcome.PASS),
        ("NVRM: Xid (PCI:0000:26:00): 79, pid=1, GPU has fallen off the bus.", Outcome.PASS),
    ],
)
def test_a_message_weighs_what_it_says_of_our_devices(devices, message, outcome):
    assert judged(devices, message).outcome == outcome


def test_the_worst_message_is_told_and_the_others_are_counted(devices):
    messages = [f"amdgpu {OURS}: amdgpu: [gfxhub0] no-retry page fault", f"amdgpu {OURS}: amdgpu: GPU reset begin!"]
    found = judged(devices, *messages)
    assert (found.outcome, found.value, found.detail) == (Outcome.REFUSE, 2, f"{messages[1]} (and 1 more)")


def test_only_what_is_logged_after_the_block_began_is_read(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(RECORD.format(1, "before"))
    with kernel_log(str(log)) as logged:
        assert logged() == []
        with log.open("a") as file:
            file.write(RECORD.format(2, "one; of two") + RECORD.format(3, "two"))
        assert logged() == ["one; of two", "two"]
        assert logged() == []


def test_a_log_that_may_not_be_read_is_unknown_and_no_pass(tmp_path, devices):
    with kernel_log(str(tmp_path / "none")) as logged:
        (found,) = faults(logged(), devices, "none")
    assert (found.outcome, found.value) == (Outcome.UNKNOWN, None)
