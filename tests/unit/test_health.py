"""Health gates: every case of tests/data/gpu, one fault at a time, and what is seen during and after a run."""

from dataclasses import replace

import pytest
from gpu import Nvml, build, case, with_reading
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.config import DeviceOptions, HealthLimits
from assay.devices import amd, nvidia
from assay.devices.health import (
    Occupancy,
    Outcome,
    Phase,
    check,
    compare,
    occupancy,
    settle,
    unfit,
)
from assay.devices.lease import lease
from assay.devices.model import Holder, Reading
from assay.errors import DeviceError

GIB = 2**30


def discovered(number, folder, tools=True):
    machine = build(case(number), folder, tools)
    return amd.discover(machine.options), machine.options


def limited(options, **limits):
    return options.model_copy(update={"limits": HealthLimits(**limits)})


def outcome_and_reasons(report):
    return report.outcome.value, report.named(Outcome.REFUSE) + report.named(Outcome.WARN)


# --- the cases ----------------------------------------------------------------------------------------------------


def test_an_idle_machine_passes_as_a_whole(tmp_path):
    node, options = discovered("01", tmp_path)
    report = check(node, node.devices, options)
    assert outcome_and_reasons(report) == ("pass", [])
    # Told by no source of this case.
    assert report.named(Outcome.UNKNOWN) == ["bad_pages", "links", "numa_balancing", "governor", "load_per_core"]
    assert report.elsewhere == ()


@pytest.mark.parametrize("number", ["02", "03", "04", "05"])
def test_every_case_gives_the_gates_worked_out_by_hand(tmp_path, number):
    content = case(number)
    node, options = discovered(number, tmp_path)
    own = content.get("own_server", {}).get("container_pids_on_host", [])
    for wanted in content["expected"]["cases"]:
        if isinstance(wanted["request"], str):
            continue
        during = wanted.get("phase") == "during"
        chosen = node.pick(wanted["request"])
        modes = {"partition_modes": None} if "options" in wanted and not wanted["options"]["require_partition"] else {}
        report = check(
            node, chosen, limited(options, **modes), own if during else (), Phase.DURING if during else Phase.IDLE
        )
        gates = set(report.named(Outcome.REFUSE)) - {"activity", "idle_power"}  # these follow from a busy device
        assert report.outcome.value == wanted["gate"], wanted
        assert gates == set(wanted["reasons"]), wanted
        if "co_tenants_elsewhere" in wanted:
            found = [(device.index, holder.pid) for device, holder in report.elsewhere]
            assert found == [(one["hip"], one["pid"]) for one in wanted["co_tenants_elsewhere"]]
        if "message_must_name" in wanted:
            with pytest.raises(DeviceError) as caught:
                report.require()
            for part in wanted["message_must_name"]:
                assert part in str(caught.value)


def test_our_own_server_is_no_stranger_and_the_stranger_elsewhere_is_described(tmp_path):
    content = case("03")
    node, options = discovered("03", tmp_path)
    pids = content["own_server"]["container_pids_on_host"]
    report = check(node, node.pick([4, 5]), options, pids, Phase.DURING)
    ((device, holder),) = report.elsewhere
    assert (device.index, str(holder)) == (6, "pid 41377 (python, docker-bbbb, 45.8 GB)")
    assert "co_tenant" in check(node, node.pick([4, 5]), options, (), Phase.DURING).named(Outcome.REFUSE)
    asked = check(node, node.pick([6]), options, pids)
    assert asked.elsewhere == () and "co_tenant" in asked.named(Outcome.REFUSE)  # not elsewhere, but here


def free(node, limits):
    why = unfit(lambda: node, limits)
    return [device.index for device in node.devices if why(device) is None]


def test_free_devices_are_leased_in_order_without_the_one_that_leaked(tmp_path):
    node, options = discovered("05", tmp_path)
    (wanted,) = (one for one in case("05")["expected"]["cases"] if one["request"] == "auto:4")
    why = unfit(lambda: node, options.limits)
    with lease(node.devices, 4, options.lock_dir, 0, "x", why) as ours:
        assert [device.index for device in ours.devices] == wanted["chosen"]
    with (
        pytest.raises(DeviceError, match=r"HIP 3 \(0000:65:00\.0\) is busy: 137\.9 GB in use.*HIP 4 .* is free"),
        lease(node.devices, 8, options.lock_dir, 0, "x", why),
    ):
        pass
    with lease(node.devices, 7, options.lock_dir, 0, "x", why):  # the lock of the one that is busy was let go of
        pass


def test_partitions_are_refused_by_default_and_idle_memory_scales_with_them(tmp_path):
    node, options = discovered("04", tmp_path)
    assert check(node, node.pick([0]), options).named(Outcome.REFUSE) == ["partition_mode"]
    # 2.4 GB on bus 26 is idle for eight partitions, and would not be for one.
    assert occupancy(node, node.devices[0], options.limits)[0] == Occupancy.FREE
    alone = replace(node, devices=node.devices[:1])
    assert occupancy(alone, alone.devices[0], options.limits)[0] == Occupancy.BUSY


def test_a_process_list_that_failed_is_unknown_and_that_is_a_warning_or_a_refusal(tmp_path):
    node, options = discovered("10", tmp_path)
    assert "memory_in_use" in check(node, node.pick([0]), options).named(Outcome.REFUSE)
    report = check(node, node.pick([1]), options)
    assert report.outcome == Outcome.WARN and report.named(Outcome.REFUSE) == []
    assert "co_tenant" in report.named(Outcome.UNKNOWN)
    report.require()
    strict = check(node, node.pick([1]), options.model_copy(update={"on_unknown": "refuse"}))
    assert strict.outcome == Outcome.REFUSE
    with pytest.raises(DeviceError, match=r"HIP 1 \(0000:26:00\.0\): co_tenant: unknown"):
        strict.require()


def test_nvidia_is_judged_by_the_same_gates(tmp_path):
    options = DeviceOptions(sysfs_root=str(tmp_path), proc_root=str(tmp_path))
    node = nvidia.discover(options, Nvml(case("09")["nvml"]["devices"]))
    assert outcome_and_reasons(check(node, node.pick([1]), options)) == ("pass", [])
    assert outcome_and_reasons(check(node, node.pick([2]), options)) == ("refuse", ["memory_in_use", "co_tenant"])
    assert free(node, options.limits) == [0, 1]
    # What only AMD has is not asked, so that it is not unknown either.
    gates = {one.gate for one in check(node, node.pick([1]), options).checks}
    assert not gates & {"performance_level", "ecc_deferred", "bad_pages", "links"} and "throttle" in gates


# --- one fault at a time ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    node, options = discovered("01", tmp_path_factory.mktemp("x"))
    node = with_reading(node, 0, Reading.THROTTLED_TICKS, 7)
    return with_reading(node, 0, Reading.BAD_PAGES_PENDING, 0), options


SICK = [
    # reading, the worst that passes, the best that does not, gate, outcome
    (Reading.MEMORY_USED, GIB, GIB + 1, "memory_in_use", Outcome.REFUSE),
    (Reading.ACTIVITY, 0, 1, "activity", Outcome.REFUSE),
    (Reading.POWER, 250, 251, "idle_power", Outcome.REFUSE),
    (Reading.POWER_CAP, 749, 748, "power_cap", Outcome.REFUSE),
    (Reading.PERFORMANCE_LEVEL, "AUTO", "MANUAL", "performance_level", Outcome.REFUSE),
    (Reading.PERFORMANCE_LEVEL, "AUTO", "PERF_DETERMINISM", "performance_level", Outcome.REFUSE),
    (Reading.TEMPERATURE, 60, 61, "temperature", Outcome.REFUSE),
    (Reading.MEMORY_TEMPERATURE, 60, 61, "memory_temperature", Outcome.REFUSE),
    (Reading.THROTTLE, "UNTHROTTLED", "THROTTLED", "throttle", Outcome.REFUSE),
    (Reading.PARTITION_MODE, "SPX/NPS1", "SPX/NPS4", "partition_mode", Outcome.REFUSE),
    (Reading.ECC_UNCORRECTABLE, 0, 1, "ecc_uncorrectable", Outcome.REFUSE),
    (Reading.ECC_DEFERRED, 0, 1, "ecc_deferred", Outcome.REFUSE),
    (Reading.ECC_CORRECTABLE, 0, 1, "ecc_correctable", Outcome.WARN),
    (Reading.BAD_PAGES_PENDING, 0, 1, "bad_pages", Outcome.REFUSE),
]


@pytest.mark.parametrize(("reading", "good", "bad", "gate", "outcome"), SICK)
def test_each_gate_passes_at_its_limit_and_speaks_beyond_it(healthy, reading, good, bad, gate, outcome):
    node, options = healthy
    assert outcome_and_reasons(check(with_reading(node, 0, reading, good), node.pick([0]), options))[0] == "pass"
    for value, wanted in ((good, Outcome.PASS), (bad, outcome), (None, Outcome.UNKNOWN)):
        sick = with_reading(node, 0, reading, value)
        found = {one.gate: one for one in check(sick, sick.pick([0]), options).checks}
        assert found[gate].outcome == wanted, value
        assert value is None or found[gate].source == "test"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 7), st.sampled_from(SICK), st.sets(st.integers(0, 7), min_size=1))
def test_a_sick_device_among_healthy_ones_refuses_itself_and_no_other(healthy, sick, fault, asked):
    node, options = healthy
    reading, _, bad, gate, outcome = fault
    node = with_reading(node, sick, reading, bad)
    report = check(node, node.pick(sorted(asked)), options)
    spoken = [(one.gate, one.device) for one in report.checks if one.outcome in (Outcome.WARN, Outcome.REFUSE)]
    assert {one for one in spoken if one[0] != "no_owner_found"} == (
        {(gate, str(node.devices[sick]))} if sick in asked else set()
    )
    assert report.outcome == (outcome if sick in asked else Outcome.PASS)


def test_a_power_sensor_that_says_next_to_nothing_is_not_believed(healthy):
    node, options = healthy
    report = check(with_reading(node, 0, Reading.POWER, 1), node.pick([0]), options)
    assert report.outcome == Outcome.PASS
    sick = with_reading(node, 0, Reading.POWER, 1)
    assert "idle_power" in check(sick, sick.pick([0]), options).named(Outcome.UNKNOWN)


def test_a_gate_whose_limit_is_null_is_not_asked(healthy):
    node, options = healthy
    sick = with_reading(node, 0, Reading.ACTIVITY, 99)
    report = check(sick, sick.pick([0]), limited(options, activity_pct=None))
    assert report.outcome == Outcome.PASS and "activity" not in {one.gate for one in report.checks}


def test_idle_gates_do_not_hold_while_a_server_runs(healthy):
    node, options = healthy
    for reading, value in ((Reading.MEMORY_USED, 190 * GIB), (Reading.ACTIVITY, 100), (Reading.POWER, 740)):
        node = with_reading(node, 0, reading, value)
    assert outcome_and_reasons(check(node, node.pick([0]), options, (), Phase.DURING)) == ("pass", [])
    hot = with_reading(node, 0, Reading.TEMPERATURE, 101)
    found = check(hot, hot.pick([0]), options, (), Phase.DURING)
    assert outcome_and_reasons(found) == ("warn", ["temperature"])


def test_a_process_that_hangs_on_a_device_is_refused(healthy):
    node, options = healthy
    hung = replace(node.devices[0], holders=(Holder(77, "test", 0, certain=False, name="python", state="D"),))
    report = check(replace(node, devices=(hung, *node.devices[1:])), (hung,), options)
    assert report.named(Outcome.REFUSE) == ["hung"]


def test_unknown_memory_is_never_free(healthy):
    node, options = healthy
    node = with_reading(node, 2, Reading.MEMORY_USED, None)
    assert occupancy(node, node.devices[2], options.limits)[0] == Occupancy.UNKNOWN
    assert 2 not in free(node, options.limits)


# --- settling, during, after --------------------------------------------------------------------------------------


def test_settling_waits_for_two_clean_looks(healthy):
    node, options = healthy
    busy = with_reading(node, 0, Reading.MEMORY_USED, 90 * GIB)
    looks = iter([busy, node, busy, node, node])
    _, report = settle(lambda: next(looks), [0], options, every_s=0)
    assert report.outcome == Outcome.PASS and next(looks, None) is None


def test_settling_gives_up_with_the_reasons(healthy):
    node, options = healthy
    busy = with_reading(node, 0, Reading.MEMORY_USED, 90 * GIB)
    _, report = settle(lambda: busy, [0], options.model_copy(update={"settle_s": 0}), every_s=0)
    with pytest.raises(DeviceError, match=r"HIP 0 .*memory_in_use: refuse: 96\.6 GB in use, 1\.1 GB allowed"):
        report.require()


@pytest.mark.parametrize(
    ("reading", "before", "after", "gate", "outcome"),
    [
        (Reading.MEMORY_USED, GIB, GIB + 2**28, "memory_returned", Outcome.PASS),
        (Reading.MEMORY_USED, GIB, GIB + 2**28 + 1, "memory_returned", Outcome.REFUSE),
        (Reading.MEMORY_USED, GIB, 0, "memory_returned", Outcome.PASS),
        (Reading.MEMORY_USED, GIB, None, "memory_returned", Outcome.UNKNOWN),
        (Reading.THROTTLED_TICKS, 7, 7, "throttle_rise", Outcome.PASS),
        (Reading.THROTTLED_TICKS, 7, 8, "throttle_rise", Outcome.WARN),  # it was slow: its answers are what they are
        (Reading.THROTTLED_TICKS, 7, None, "throttle_rise", Outcome.UNKNOWN),
        (Reading.ECC_UNCORRECTABLE, 0, 1, "ecc_uncorrectable_rise", Outcome.REFUSE),
        (Reading.ECC_UNCORRECTABLE, 3, 3, "ecc_uncorrectable_rise", Outcome.PASS),
        (Reading.ECC_DEFERRED, 0, 1, "ecc_deferred_rise", Outcome.REFUSE),
        (Reading.ECC_CORRECTABLE, 5, 105, "ecc_correctable_rise", Outcome.PASS),
        (Reading.ECC_CORRECTABLE, 5, 106, "ecc_correctable_rise", Outcome.REFUSE),
    ],
)
def test_what_a_run_left_behind_is_found(healthy, reading, before, after, gate, outcome):
    node, options = healthy
    first, last = with_reading(node, 0, reading, before), with_reading(node, 0, reading, after)
    found = {one.gate: one.outcome for one in compare(first, last, first.pick([0]), options).checks}
    assert found.pop(gate) == outcome
    assert set(found.values()) == {Outcome.PASS}


def test_a_gate_of_what_only_amd_tells_refuses_no_other_device(healthy):
    node = nvidia.discover(DeviceOptions(), Nvml(case("09")["nvml"]["devices"]))
    strict = DeviceOptions(on_unknown="refuse", limits=HealthLimits(ecc_correctable_rise=None, ecc_uncorrectable=0))
    known = with_reading(node, 0, Reading.ECC_UNCORRECTABLE, 0)
    assert compare(known, known, known.pick([0]), strict).outcome == Outcome.PASS
    assert compare(node, node, node.pick([0]), strict).outcome == Outcome.REFUSE  # that NVML could have told
    assert "ecc_deferred_rise" in {one.gate for one in compare(*[healthy[0]] * 2, healthy[0].pick([0]), strict).checks}


def test_a_device_that_changed_its_number_during_a_run_is_an_error(healthy):
    node, options = healthy
    moved = replace(node, devices=tuple(replace(one, index=7 - one.index) for one in node.devices))
    with pytest.raises(DeviceError, match="before the run"):
        compare(node, moved, node.pick([0]), options)
    with pytest.raises(DeviceError, match="no device 0"):
        compare(node, replace(node, devices=node.devices[1:]), node.pick([0]), options)


# --- links and host -----------------------------------------------------------------------------------------------


def test_devices_that_work_together_must_be_joined(healthy):
    node, options = healthy
    nodes = {one.node for one in node.devices}

    def joined(missing=()):
        devices = [
            replace(one, links=frozenset(nodes - {one.node} - {b for a, b in missing if a == one.index}))
            for one in node.devices
        ]
        return replace(node, devices=tuple(devices))

    def links(found, indices):
        return [one.outcome for one in check(found, found.pick(indices), options).checks if one.gate == "links"]

    assert links(joined(), [0, 1, 2]) == [Outcome.PASS]
    broken = joined(missing=[(0, node.devices[2].node)])
    assert links(broken, [0, 1]) == [Outcome.PASS] and links(broken, [0, 1, 2]) == [Outcome.REFUSE]
    assert links(node, [0, 1]) == [Outcome.UNKNOWN] and links(node, [0]) == []


def test_links_are_read_from_the_kfd(tmp_path):
    machine = build(case("01"), tmp_path, tools=False)
    for number, (kind, to) in enumerate([(2, 0), (11, 3), (11, 4)]):  # PCIe to a CPU, XGMI to two GPUs
        folder = machine.sysfs / "class/kfd/kfd/topology/nodes/2/io_links" / str(number)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"type {kind}\nnode_from 2\nnode_to {to}\n")
    first, second, *_ = amd.discover(machine.options).devices
    assert (first.links, second.links) == (frozenset({3, 4}), None)


def test_a_host_that_makes_timings_unsteady_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    machine = build(case("01"), tmp_path)
    (machine.proc / "sys/kernel").mkdir(parents=True)
    governor = machine.sysfs / "devices/system/cpu/cpu0/cpufreq/scaling_governor"
    governor.parent.mkdir(parents=True)

    def say(balancing, speed, load):
        (machine.proc / "sys/kernel/numa_balancing").write_text(f"{balancing}\n")
        (machine.proc / "loadavg").write_text(f"{load} 1.0 1.0 1/100 4242\n")
        governor.write_text(speed + "\n")
        node = amd.discover(machine.options, need=())
        return check(node, node.pick([0]), machine.options).named(Outcome.WARN)

    assert say(0, "performance", 3.9) == []
    assert say(1, "powersave", 4.0) == ["numa_balancing", "governor", "load_per_core"]
