"""What is seen while a server runs."""

import json
import time

import pytest
from gpu import build, case, with_reading

from assay.config import HealthLimits
from assay.devices import amd
from assay.devices.health import Outcome
from assay.devices.model import Reading
from assay.devices.watch import Watch, watch
from assay.errors import DeviceError, StoreError


@pytest.fixture(scope="module")
def idle(tmp_path_factory):
    return amd.discover(build(case("01"), tmp_path_factory.mktemp("x"), tools=False).options)


def until(condition, limit_s=60):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stranger_that_comes_in_the_middle_of_a_run_is_seen_with_pid_and_memory(tmp_path):
    machine = build(case("01"), tmp_path, tools=False)
    machine.compute(100, {13908: 90_000_000_000})

    def look():
        return amd.discover(machine.options, need=[Reading.MEMORY_USED])

    with watch(look, [2, 3], lambda: {100}, tmp_path / "watch.jsonl", every_s=0.01, limits=HealthLimits()) as seen:
        until(lambda: seen.looks > 1)
        assert not seen.strangers
        machine.compute(666, {14885: 5_000_000})
        machine.compute(777, {18793: 5_000_000})  # on HIP 7, which is not ours
        until(lambda: seen.strangers)
        machine.compute(666, {14885: 7_000_000_000})
        until(lambda: seen.strangers[666].memory == 7_000_000_000)
    stranger = seen.strangers.pop(666)
    assert (stranger.device, stranger.memory) == ("HIP 3 (0000:65:00.0)", 7_000_000_000)
    assert seen.strangers == {} and seen.failed == [] and seen.blind == set()
    samples = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * seen.looks
    assert {sample["device"] for sample in samples} == {"HIP 2 (0000:46:00.0)", "HIP 3 (0000:65:00.0)"}
    assert samples[0]["memory_used"] == 296747008 and samples[0]["strangers"] == []
    assert samples[-1]["strangers"][0]["pid"] == 666


def test_a_stranger_on_another_partition_of_our_pci_device_is_seen(tmp_path):
    machine = build(case("04"), tmp_path, tools=False)
    machine.compute(666, {12931: 5_000_000})  # HIP 1, partition 1 of bus 26
    machine.compute(777, {19770: 5_000_000})  # HIP 8, of bus 05
    seen = Watch()
    seen.take(amd.discover(machine.options), [0], set(), "now")
    assert list(seen.strangers) == [666]


def test_a_process_of_ours_that_ends_while_we_look_is_no_stranger(tmp_path):
    machine = build(case("01"), tmp_path, tools=False)
    machine.compute(100, {13908: 90_000_000_000})
    ours = {100}

    def look():
        ours.clear()  # it has just ended
        return amd.discover(machine.options, need=[Reading.MEMORY_USED])

    with watch(look, [2], lambda: ours | {1}, tmp_path / "watch.jsonl", every_s=99, limits=HealthLimits()) as seen:
        until(lambda: seen.looks == 1)
    assert not seen.strangers


def test_a_look_that_fails_is_noted_and_the_next_is_made(tmp_path, idle):
    answers = iter([DeviceError("the sensor is gone"), idle])

    def look():
        answer = next(answers, idle)
        if isinstance(answer, DeviceError):
            raise answer
        return answer

    with watch(look, [0], set, tmp_path / "watch.jsonl", every_s=0.01, limits=HealthLimits()) as seen:
        until(lambda: seen.looks > 0)
    assert seen.failed == ["the sensor is gone"]
    assert seen.blind == {"HIP 0 (0000:05:00.0)"}  # the machine has no list of processes
    assert json.loads((tmp_path / "watch.jsonl").read_text().splitlines()[0])["error"] == "the sensor is gone"


def test_a_watch_that_breaks_off_is_no_silent_matter(tmp_path, idle):
    with (
        pytest.raises(ZeroDivisionError),
        watch(lambda: 1 / 0, [0], set, tmp_path / "watch.jsonl", every_s=0.01, limits=HealthLimits()),
    ):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StoreError, match=r"cannot write .*file"),
        watch(lambda: idle, [0], set, tmp_path / "file/x", 1, HealthLimits()),
    ):
        pass


def looked(idle, *readings, **limits):
    """What gates say after looks at HIP 0 and 1, at each of which HIP 0 has these readings."""
    seen = Watch(HealthLimits(**limits))
    for changes in readings:
        node = with_reading(idle, 1, Reading.CLOCK, 2100)
        for reading, value in changes.items():
            node = with_reading(node, 0, reading, value)
        seen.take(node, [0, 1], set(), "now")
    return {(one.gate, one.device.split()[1] if one.device != "all" else "all"): one for one in seen.checks}


@pytest.mark.parametrize(("limit", "outcome"), [(5, Outcome.PASS), (2, Outcome.WARN)])
def test_devices_that_ran_at_different_clocks_are_a_warning(idle, limit, outcome):
    clocks = [{Reading.CLOCK: clock} for clock in (2100, 2000, 2050)]
    found = looked(idle, *clocks, clock_spread_pct=limit)[("clock_spread", "all")]
    # medians 2050 and 2100: 2.44 % apart
    assert (found.outcome, found.value) == (outcome, 2.44)
    assert ("clock_spread", "all") not in looked(idle, *clocks, clock_spread_pct=None)


@pytest.mark.parametrize(
    ("reading", "fine", "wrong", "gate", "outcome"),
    [
        (Reading.TEMPERATURE, 100, 101, "temperature", Outcome.WARN),
        (Reading.MEMORY_TEMPERATURE, 100, 101, "memory_temperature", Outcome.WARN),
        (Reading.THROTTLE, "UNTHROTTLED", "THROTTLED", "throttle", Outcome.WARN),
        (Reading.PERFORMANCE_LEVEL, "AUTO", "MANUAL", "performance_level", Outcome.WARN),
        (Reading.POWER_CAP, 749, 748, "power_cap", Outcome.WARN),
        (Reading.ECC_UNCORRECTABLE, 0, 1, "ecc_uncorrectable", Outcome.REFUSE),
        (Reading.ECC_DEFERRED, 0, 1, "ecc_deferred", Outcome.REFUSE),
    ],
)
def test_what_goes_wrong_at_one_look_is_told_of_its_device(idle, reading, fine, wrong, gate, outcome):
    good = {Reading.POWER_CAP_DEFAULT: 750, reading: fine}
    bad = good | {reading: wrong}
    clean, sick = looked(idle, good, good, good), looked(idle, good, bad, good)
    assert clean[(gate, "0")].outcome == Outcome.PASS
    assert (sick[(gate, "0")].outcome, sick[(gate, "0")].value) == (outcome, wrong)
    assert sick[(gate, "1")] == clean[(gate, "1")]


def test_the_worst_of_several_looks_is_told_and_a_value_read_once_is_known(idle):
    hot = [{Reading.TEMPERATURE: value} for value in (None, 70, 110, 105, None)]
    found = looked(idle, *hot)[("temperature", "0")]
    assert (found.outcome, found.value) == (Outcome.WARN, 110)
    never = looked(idle, hot[0], hot[0])[("temperature", "0")]
    assert (never.outcome, never.value) == (Outcome.UNKNOWN, None)
