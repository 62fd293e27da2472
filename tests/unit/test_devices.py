"""Which device is which: every case of tests/data/gpu, and mutations of them, to the right map or to none."""

import json
import random
import re
from copy import deepcopy
from pathlib import Path

import pynvml
import pytest
from gpu import NO_TOOL, Nvml, build, case, script, without
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.config import DeviceOptions, HealthLimits
from assay.devices import amd, kfd, nvidia, smi
from assay.devices.discovery import discover_any
from assay.devices.health import Occupancy, occupancy
from assay.devices.masks import visible
from assay.devices.model import Known, Reading
from assay.errors import DeviceError, NoDeviceError

AMD_CASES = ["01", "02", "03", "04", "05", "07", "10"]


def expected_map(content, key="hip"):
    return [
        (one["hip"], one["node"], one["bdf"], one["amd_smi"], one.get("render")) for one in content["expected"][key]
    ]


def found_map(devices):
    return [(number, one.node, one.address, one.tool_index.value, one.render) for number, one in enumerate(devices)]


@pytest.mark.parametrize("tools", [True, False], ids=["with amd-smi", "sysfs alone"])
@pytest.mark.parametrize("number", AMD_CASES)
def test_every_case_gives_the_map_worked_out_by_hand(tmp_path, number, tools):
    content = case(number)
    node = amd.discover(build(content, tmp_path, tools).options)
    assert found_map(visible(node.devices, content["env"])) == expected_map(content)


@pytest.mark.parametrize("tools", [True, False], ids=["with amd-smi", "sysfs alone"])
@pytest.mark.parametrize("number", ["01", "02", "03", "04", "05", "10"])
def test_every_case_gives_the_busy_devices_worked_out_by_hand(tmp_path, number, tools):
    content = case(number)
    node = amd.discover(build(content, tmp_path, tools).options)
    busy = [one.index for one in node.devices if occupancy(node, one, HealthLimits())[0] == Occupancy.BUSY]
    assert busy == content["expected"]["busy_hip"]


def test_nodes_hidden_by_the_device_cgroup_have_no_number_and_are_named(tmp_path):
    content = case("07")
    node = amd.discover(build(content, tmp_path).options)
    wanted = [(one["hip"], one["node"], one["bdf"], one["amd_smi"]) for one in content["expected"]["unmasked_hip"]]
    assert [found[:4] for found in found_map(node.devices)] == wanted
    assert node.sources["sysfs"] == "read (hidden here: nodes 2, 3, 5, 8, 9)"


def test_a_node_that_may_not_be_read_is_hidden(tmp_path, monkeypatch):
    machine = build(case("01"), tmp_path, tools=False)
    real = Path.read_text

    def read(path, *arguments, **options):
        if path.parent.name == "2" and path.name == "gpu_id":
            raise PermissionError(1, "Operation not permitted", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read)
    assert [one.node for one in amd.discover(machine.options).devices] == [3, 4, 5, 6, 7, 8, 9]


def test_partitions_share_a_pci_device_and_its_memory_and_no_id_picks_one(tmp_path):
    content = case("04")
    node = amd.discover(build(content, tmp_path).options)
    groups = content["expected"]["physical_groups"]
    assert {pci: [one.index for one in node.devices if one.pci == pci] for pci in groups} == groups
    assert [one.partition for one in node.devices] == [*range(8), *range(8)]
    assert {one.memory_used for one in node.devices if one.pci == "0000:05:00.0"} == {23_900_000_000}
    assert {one.uuid for one in node.devices} == {None}
    assert {one[Reading.PARTITION_MODE] for one in node.devices} == {Known("CPX/NPS4", "sysfs")}


def test_kernels_that_give_each_partition_an_id_of_its_own_are_read_too(tmp_path):
    content = case("04")
    for index, one in enumerate(gpu_nodes(content), start=1):
        one["properties"]["unique_id"] = index
    node = amd.discover(build(content, tmp_path).options)
    assert found_map(node.devices) == expected_map(content)
    assert node.devices[3].uuid == "GPU-0000000000000004"


def test_each_value_names_its_source(tmp_path):
    node = amd.discover(build(case("01"), tmp_path).options)
    (first, *_) = node.devices
    assert first[Reading.MEMORY_USED] == Known(296747008, "sysfs")
    assert first[Reading.POWER] == Known(140, "sysfs")
    assert first[Reading.TEMPERATURE] == Known(41, "sysfs")
    assert first[Reading.PERFORMANCE_LEVEL] == Known("AUTO", "amd-smi")
    assert first[Reading.POWER_CAP_DEFAULT] == Known(750, "amd-smi")
    assert first[Reading.BAD_PAGES_PENDING].value is None
    assert first.tool_index == Known(0, "amd-smi")
    assert first.holders_source == "amd-smi"
    assert node.sources["amd-smi"] == "read" and node.sources["rocm-smi"] == f"there is no command {NO_TOOL}"
    alone = amd.discover(build(case("01"), tmp_path / "alone", tools=False).options)
    assert alone.devices[0].tool_index == Known(0, "position by PCI address")
    assert alone.devices[0].holders_source is None


def test_a_tool_is_asked_only_while_something_is_missing(tmp_path):
    machine = build(case("01"), tmp_path)
    script(tmp_path / "amd-smi", f"touch {tmp_path}/asked\nexit 1\n")
    node = amd.discover(machine.options, need=[Reading.MEMORY_USED, Reading.POWER])
    assert node.sources["amd-smi"] == "not asked" and not (tmp_path / "asked").exists()
    machine.pci("0000:65:00.0").joinpath("mem_info_vram_used").unlink()
    node = amd.discover(machine.options, need=[Reading.MEMORY_USED])
    assert (tmp_path / "asked").exists() and node.sources["amd-smi"] == "exit status 1"
    assert occupancy(node, node.devices[3], HealthLimits())[0] == Occupancy.UNKNOWN  # and not free


def test_memory_that_sysfs_does_not_tell_comes_from_amd_smi(tmp_path):
    machine = build(case("02"), tmp_path)
    for folder in (machine.sysfs / "devices/pci0000:00").iterdir():
        folder.joinpath("mem_info_vram_used").unlink(missing_ok=True)
    node = amd.discover(machine.options)
    # HIP 0 is amd-smi 3, which says 163078 MB; HIP 3 is amd-smi 1, which is idle.
    assert node.devices[0][Reading.MEMORY_USED] == Known(163078 * 2**20, "amd-smi")
    busy = [one.index for one in node.devices if occupancy(node, one, HealthLimits())[0] == Occupancy.BUSY]
    assert busy == [0, 1]


def test_memory_of_partitions_is_that_of_their_pci_device_whoever_tells_it(tmp_path):
    machine = build(case("04"), tmp_path)
    for address in ("0000:05:00.0", "0000:26:00.0"):
        machine.pci(address).joinpath("mem_info_vram_used").unlink()
    node = amd.discover(machine.options)
    # amd-smi tells it of partition 0 alone (22792 MB on bus 05, 2288 MB on bus 26), and of the others "N/A".
    rows = {row["gpu"]: row["mem_usage"]["used_vram"] for row in case("04")["amd_smi"]["metric"]}
    assert rows[1] == rows[9] == "N/A"
    assert [one.memory_used for one in node.devices] == [rows[8]["value"] * 2**20] * 8 + [rows[0]["value"] * 2**20] * 8


def test_a_process_that_uses_no_memory_of_a_device_is_no_tenant_of_it(tmp_path):
    content = case("02")
    (entry,) = (row for row in content["amd_smi"]["process"] if row["gpu"] == 0)
    entry["process_list"] = [{"process_info": {"name": "monitor", "pid": 5, "mem_usage": {"value": 0, "unit": "B"}}}]
    node = amd.discover(build(content, tmp_path).options)
    (holder,) = node.devices[2].holders  # HIP 2 is amd-smi 0
    assert (holder.pid, holder.memory, holder.certain) == (5, 0, False)
    assert occupancy(node, node.devices[2], HealthLimits())[0] == Occupancy.FREE


# --- refusals -----------------------------------------------------------------------------------------------------


def test_no_device_is_an_error_that_says_what_was_asked_and_nothing_falls_back_to_the_cpu(tmp_path):
    options = build({"sysfs": {"kfd_nodes": [], "drm": []}}, tmp_path, tools=False).options
    with pytest.raises(NoDeviceError, match=r"no AMD device.*falls back to the CPU.*sysfs: no .*amd-smi: "):
        amd.discover(options)
    content = case("01")
    content["sysfs"]["kfd_nodes"] = content["sysfs"]["kfd_nodes"][:2]  # the CPUs
    with pytest.raises(NoDeviceError, match="KFD has no GPU node"):
        amd.discover(build(content, tmp_path / "cpu").options)


@pytest.mark.parametrize("command", ["list", "metric", "process", "static"])
def test_partial_output_of_amd_smi_is_refused_by_the_device_that_is_missing(tmp_path, command):
    content = case("01")
    del content["amd_smi"][command][3]
    with pytest.raises(DeviceError, match=r"0000:65:00\.0"):
        amd.discover(build(content, tmp_path).options)


def test_a_list_that_numbers_two_devices_the_same_is_refused(tmp_path):
    content = case("01")
    content["amd_smi"]["list"][3]["gpu"] = 2
    with pytest.raises(DeviceError, match="GPU numbers"):
        amd.discover(build(content, tmp_path).options)


def test_swapped_addresses_in_a_list_without_kfd_nodes_are_refused(tmp_path):
    content = case("10")
    first, second = json.loads(content["raw_stdout"]["list"])
    first["bdf"], second["bdf"] = second["bdf"], first["bdf"]
    content["raw_stdout"]["list"] = json.dumps([first, second])
    with pytest.raises(DeviceError, match="another order than by PCI address"):
        amd.discover(build(content, tmp_path).options)


def test_without_a_topology_the_order_comes_from_the_kfd_nodes_of_amd_smi_or_from_nowhere(tmp_path):
    content = case("02")
    content["sysfs"] = {"kfd_nodes": [], "drm": []}
    node = amd.discover(build(content, tmp_path).options)
    wanted = [(one["bdf"], one["amd_smi"]) for one in content["expected"]["hip"]]
    assert [(one.address, one.tool_index.value) for one in node.devices] == wanted
    for row in content["amd_smi"]["list_e"]:
        del row["node_id"]
    with pytest.raises(DeviceError, match="which HIP number each has cannot be told"):
        amd.discover(build(content, tmp_path / "none").options)


# --- mutations ----------------------------------------------------------------------------------------------------


def truth(content):
    """The right map of a case, straight from its nodes: address and KFD node, in the order of HIP."""
    found = []
    for one in content["sysfs"]["kfd_nodes"]:
        if not one.get("unreadable") and one["gpu_id"]:
            place, domain = one["properties"]["location_id"], one["properties"]["domain"]
            bus, slot, function = place >> 8 & 0xFF, place >> 3 & 0x1F, place >> 28 or place & 7
            found.append((one["node"], f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"))
    return found


def outcome(content, folder, tools):
    """The map that comes out, or "refused"."""
    try:
        node = amd.discover(build(content, folder, tools).options)
    except DeviceError:
        return "refused"
    return [(one.node, one.address) for one in node.devices]


def gpu_nodes(content):
    return [one for one in content["sysfs"]["kfd_nodes"] if not one.get("unreadable") and one["gpu_id"]]


mutation = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
cases_of_many = st.sampled_from(["01", "02", "03", "05"])


@mutation
@given(st.sampled_from(AMD_CASES), st.data())
def test_nodes_exchanged_as_a_whole_are_another_order_and_give_its_map(tmp_path_factory, number, data):
    content = case(number)
    nodes = gpu_nodes(content)
    order = data.draw(st.permutations(nodes))
    numbers = sorted(one["node"] for one in nodes)
    for one, number in zip(order, numbers, strict=True):
        one["node"] = number
    content["sysfs"]["kfd_nodes"].sort(key=lambda one: one["node"])
    found = outcome(content, tmp_path_factory.mktemp("x"), tools=False)
    assert found == truth(content)


@mutation
@given(cases_of_many, st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True), st.booleans(), st.data())
def test_a_property_exchanged_between_two_nodes_is_refused(tmp_path_factory, number, pair, tools, data):
    content = case(number)
    first, second = (gpu_nodes(content)[index]["properties"] for index in pair)
    names = ["location_id", "drm_render_minor", "unique_id"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        first[name], second[name] = second[name], first[name]
    assert outcome(content, tmp_path_factory.mktemp("x"), tools) == "refused"


@mutation
@given(st.sampled_from(AMD_CASES), st.booleans(), st.data())
def test_a_property_that_is_gone_is_refused(tmp_path_factory, number, tools, data):
    content = case(number)
    name = data.draw(st.sampled_from(["domain", "location_id", "drm_render_minor", "unique_id"]))
    del data.draw(st.sampled_from(gpu_nodes(content)))["properties"][name]
    assert outcome(content, tmp_path_factory.mktemp("x"), tools) == "refused"


def virtual_functions(content):
    """The case with every GPU in a PCI domain of its own, at the same bus, as a cloud hands out virtual functions."""
    for index, one in enumerate(gpu_nodes(content), start=1):
        place = one["properties"]["location_id"]
        address = f"{one['properties']['domain']:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
        (card,) = (card for card in content["sysfs"]["drm"] if card.get("bdf") == address)
        one["properties"] |= {"location_id": 4 << 3, "domain": index}
        card["bdf"] = f"{index:04x}:00:04.0"
    return content


@mutation
@given(st.sampled_from(["01", "02", "03", "05", "07", "10"]))
def test_one_pci_domain_for_each_virtual_function_keeps_them_apart(tmp_path_factory, number):
    content = virtual_functions(case(number))
    found = outcome(content, tmp_path_factory.mktemp("x"), tools=False)
    assert found == truth(content)
    assert len({address for _, address in found}) == len(gpu_nodes(content))


@mutation
@given(cases_of_many, st.sets(st.integers(0, 7), min_size=1))
def test_virtual_functions_whose_domain_is_dropped_are_refused(tmp_path_factory, number, dropped):
    content = virtual_functions(case(number))
    for index in dropped:
        gpu_nodes(content)[index]["properties"]["domain"] = 0
    assert outcome(content, tmp_path_factory.mktemp("x"), tools=False) == "refused"


def test_two_nodes_that_say_one_address_are_refused_where_nothing_else_could_tell(tmp_path):
    content = virtual_functions(case("01"))
    for one in gpu_nodes(content)[3:5]:
        one["properties"]["domain"] = 0
    content["sysfs"]["drm"] = []
    with pytest.raises(DeviceError, match=r"KFD node 5 and 6 both say they are 0000:00:04\.0"):
        amd.discover(build(content, tmp_path, tools=False).options)


@mutation
@given(st.sampled_from(AMD_CASES), st.data())
def test_two_nodes_with_one_address_or_render_node_are_refused(tmp_path_factory, number, data):
    content = case(number)
    nodes = gpu_nodes(content)
    first, second = data.draw(st.lists(st.sampled_from(range(len(nodes))), min_size=2, max_size=2, unique=True))
    name = data.draw(st.sampled_from(["location_id", "drm_render_minor"]))
    nodes[first]["properties"][name] = nodes[second]["properties"][name]
    assert outcome(content, tmp_path_factory.mktemp("x"), tools=False) == "refused"


def test_two_partitions_with_one_render_node_are_refused(tmp_path):
    content = case("04")
    nodes = gpu_nodes(content)
    nodes[3]["properties"]["drm_render_minor"] = nodes[2]["properties"]["drm_render_minor"]
    with pytest.raises(DeviceError, match="KFD node 4 and 5 both say they have renderD130"):
        amd.discover(build(content, tmp_path, tools=False).options)


@mutation
@given(cases_of_many, st.data())
def test_a_tool_that_drops_the_domain_is_refused(tmp_path_factory, number, data):
    content = case(number)
    key = next(name for name in ("list_e", "list") if name in content["amd_smi"])
    row = data.draw(st.sampled_from(content["amd_smi"][key]))
    row["bdf"] = row["bdf"].removeprefix("0000:")
    assert outcome(content, tmp_path_factory.mktemp("x"), tools=True) == "refused"


@mutation
@given(st.sampled_from(["01", "02", "04", "07"]), st.booleans(), st.data())
def test_hidden_nodes_give_the_map_of_those_that_are_left(tmp_path_factory, number, tools, data):
    content = case(number)
    nodes = gpu_nodes(content)
    hidden = data.draw(st.lists(st.sampled_from(range(len(nodes))), max_size=len(nodes) - 1, unique=True))
    for index in hidden:
        nodes[index]["unreadable"] = "EPERM"
    found = outcome(content, tmp_path_factory.mktemp("x"), tools)
    assert found == truth(content) and len(found) == len(nodes) - len(hidden)


@mutation
@given(st.sampled_from(["01", "02", "03", "04", "05", "07"]), st.randoms(use_true_random=False), st.data())
def test_rows_of_amd_smi_that_trade_places_are_refused_and_shuffled_ones_change_nothing(
    tmp_path_factory, number, shuffle, data
):
    content = case(number)
    key = next(name for name in ("list_e", "list") if name in content["amd_smi"])
    shuffled = deepcopy(content)
    for rows in shuffled["amd_smi"].values():
        if isinstance(rows, list):
            shuffle.shuffle(rows)
    node = amd.discover(build(shuffled, tmp_path_factory.mktemp("x")).options)
    assert found_map(visible(node.devices, content["env"])) == expected_map(content)
    rows = content["amd_smi"][key]
    first, second = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=2, max_size=2, unique=True))
    rows[first]["bdf"], rows[second]["bdf"] = rows[second]["bdf"], rows[first]["bdf"]
    assert outcome(content, tmp_path_factory.mktemp("x"), tools=True) == "refused"


# --- the tools' shapes --------------------------------------------------------------------------------------------


def test_messy_output_is_read_and_what_failed_is_unknown(tmp_path):
    content = case("10")
    metric = smi.parse_json(content["raw_stdout"]["metric"])["gpu_data"]
    names = {
        "used_mb": (Reading.MEMORY_USED, 2**20),
        "total_mb": (Reading.MEMORY_TOTAL, 2**20),
        "power_w": (Reading.POWER, 1),
        "ecc_ue": (Reading.ECC_UNCORRECTABLE, 1),
        "gfx_activity": (Reading.ACTIVITY, 1),
    }
    for gpu, wanted in content["expected"]["parsed"].items():
        found = smi.smi_readings({"metric": metric[int(gpu)]})
        for name, (reading, unit) in names.items():
            assert found.get(reading) == (None if wanted[name] is None else wanted[name] * unit), (gpu, name)
    node = amd.discover(build(content, tmp_path).options)
    assert node.sources["amd-smi"] == "read"
    assert [one.holders_source for one in node.devices] == [None, None]  # `process` failed: unknown, not empty


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"gpu": 0}]', [{"gpu": 0}]),
        ('WARNING: [groups] {render}\n{"gpu_data": []}\n', {"gpu_data": []}),
        ("[WARNING] x\n[1]", [1]),
    ],
)
def test_text_before_the_json_is_skipped(text, found):
    assert smi.parse_json(text) == found


@pytest.mark.parametrize("text", ["", "N/A", '[{"gpu": 0},', '[{"gpu": 0}]\ntrailing', 'x {"gpu": 0}'])
def test_output_that_is_cut_or_goes_on_is_no_answer(text):
    with pytest.raises(ValueError):
        smi.parse_json(text)


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        ({"value": 283, "unit": "MB"}, 283 * 2**20),
        ({"value": "N/A", "unit": "MB"}, None),
        ("283 MB", 283 * 2**20),
        ("12.5 %", 12.5),
        ("0", 0),
        (0, 0),
        (True, None),
        ("N/A", None),
        (None, None),
    ],
)
def test_every_shape_of_a_number_is_read(leaf, value):
    assert smi.number(leaf) == value


@pytest.mark.parametrize(
    ("said", "throttle"),
    [
        ("UNTHROTTLED", "UNTHROTTLED"),
        (False, "UNTHROTTLED"),
        (0, "UNTHROTTLED"),
        (True, "THROTTLED"),
        (8, "8"),
        ("N/A", None),
    ],
)
def test_whether_a_device_is_slowed_down_is_read_in_every_shape(said, throttle):
    found = smi.smi_readings({"metric": {"power": {"throttle_status": said}}})
    assert found.get(Reading.THROTTLE) == throttle


def throttling(**changed):
    """What `amd-smi metric` of 6.4 and later has in its section `throttle`, as its documentation shows it."""
    kinds = ("prochot", "ppt", "socket_thermal", "vr_thermal", "hbm_thermal")
    told = {f"{kind}_accumulated": 0 for kind in kinds} | {f"{kind}_violation_status": "NOT ACTIVE" for kind in kinds}
    return {"accumulation_counter": 11240028, "gfx_clk_below_host_limit_accumulated": "N/A"} | told | changed


@pytest.mark.parametrize(
    ("section", "throttle", "ticks"),
    [
        (throttling(), "UNTHROTTLED", 0),
        (throttling(hbm_thermal_violation_status="ACTIVE", hbm_thermal_accumulated=5), "THROTTLED: hbm_thermal", 5),
        # The power cap does its work under load: no fault.
        (throttling(ppt_violation_status="ACTIVE", ppt_accumulated=9), "UNTHROTTLED", 0),
        (throttling(vr_thermal_accumulated="N/A"), "UNTHROTTLED", None),
        (dict.fromkeys(throttling(), "N/A"), None, None),
        ("N/A", None, None),
    ],
)
def test_later_releases_tell_a_slowdown_by_its_cause_and_count_it(section, throttle, ticks):
    found = smi.smi_readings({"metric": {"power": {"throttle_status": "N/A"}, "throttle": section}})
    assert (found.get(Reading.THROTTLE), found.get(Reading.THROTTLED_TICKS)) == (throttle, ticks)


PAGE = {"page_address": 4096, "page_size": 4096, "status": "PENDING"}


@pytest.mark.parametrize(
    ("pending", "count"),
    [("No bad pages found.", 0), ([PAGE, PAGE], 2), (PAGE, 1), ("N/A", None), (None, None)],  # one alone has no list
)
def test_pages_that_wait_to_be_retired_are_counted(pending, count):
    found = smi.smi_readings({"bad-pages": {"retired": "No bad pages found.", "pending": pending}})
    assert found.get(Reading.BAD_PAGES_PENDING) == count


def test_bad_pages_that_sysfs_does_not_tell_are_asked_of_amd_smi(tmp_path):
    content = case("01")
    found = {device["gpu"]: "No bad pages found." for device in content["amd_smi"]["list"]} | {3: [PAGE]}
    content["amd_smi"]["bad-pages"] = [{"gpu": gpu, "pending": pages} for gpu, pages in found.items()]
    devices = amd.discover(build(content, tmp_path).options).devices
    told = {device.tool_index.value: device[Reading.BAD_PAGES_PENDING] for device in devices}
    assert told.pop(3) == Known(1, "amd-smi") and set(told.values()) == {Known(0, "amd-smi")}


def test_a_library_that_prints_and_raises_is_passed_over(tmp_path):
    package = tmp_path / "packages/amdsmi/__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text(
        "print('Unable to load libamd_smi.so')\nprint('[please] {install}')\nraise KeyError('ROCM_PATH')\n"
    )
    machine = build(case("01"), tmp_path)
    options = _with_python(machine.options, tmp_path)
    assert amd.discover(options).sources["amdsmi"] == "exit status 1: KeyError: 'ROCM_PATH'"


def test_a_library_that_works_is_read_whatever_it_prints(tmp_path):
    package = tmp_path / "packages/amdsmi/__init__.py"
    package.parent.mkdir(parents=True)
    rows = sorted(case("02")["amd_smi"]["list_e"], key=lambda row: row["gpu"])
    package.write_text(
        f"""
import os
ROWS = {rows!r}
def amdsmi_init(): os.system("echo noise from C")
def amdsmi_get_processor_handles(): return ROWS
def amdsmi_get_gpu_device_bdf(row): return row["bdf"].upper()
def amdsmi_get_gpu_kfd_info(row): return {{"kfd_id": row["kfd_id"], "node_id": row["node_id"]}}
def amdsmi_get_gpu_asic_info(row): return {{"market_name": "AMD Instinct MI300X OAM"}}
def amdsmi_get_gpu_vram_usage(row): return {{"vram_total": 196592, "vram_used": 1000 + row["gpu"]}}
def amdsmi_get_power_info(row): return {{"average_socket_power": "N/A", "current_socket_power": 141}}
def amdsmi_get_gpu_perf_level(row): return "AMDSMI_DEV_PERF_LEVEL_AUTO"
def amdsmi_get_gpu_process_list(row):
    return [{{"pid": 900 + row["gpu"], "name": "N/A", "memory_usage": {{"vram_mem": 5}}}}] if row["gpu"] == 3 else []
class AmdSmiMemoryPageStatus: RESERVED, PENDING = 0, 1
def amdsmi_get_gpu_bad_page_info(row): return [{{"status": 0}}, {{"status": 1}}] if row["gpu"] == 3 else []
def amdsmi_get_gpu_activity(row): raise RuntimeError("no permission")
"""
    )
    machine = build(case("02"), tmp_path, tools=False)
    for folder in (machine.sysfs / "devices/pci0000:00").iterdir():
        folder.joinpath("mem_info_vram_used").unlink(missing_ok=True)
        folder.joinpath("gpu_busy_percent").unlink(missing_ok=True)
    node = amd.discover(_with_python(machine.options, tmp_path))
    assert found_map(node.devices) == expected_map(case("02"))
    # HIP 0 is amd-smi 3.
    assert node.devices[0][Reading.MEMORY_USED] == Known(1003 * 2**20, "amdsmi")
    assert node.devices[0][Reading.PERFORMANCE_LEVEL] == Known("AUTO", "amdsmi")
    assert [one[Reading.BAD_PAGES_PENDING] for one in node.devices[:2]] == [Known(1, "amdsmi"), Known(0, "amdsmi")]
    assert node.devices[0][Reading.ACTIVITY].value is None
    assert [(one.pid, one.memory) for one in node.devices[0].holders] == [(903, 5)]
    assert [one.holders for one in node.devices[1:]] == [()] * 7
    assert {one.holders_source for one in node.devices} == {"amdsmi"}


def _with_python(options, folder):
    python = script(folder / "python", f'PYTHONPATH="{folder}/packages" exec python3 "$@"\n')
    return options.model_copy(update={"tools": options.tools.model_copy(update={"amdsmi_python": str(python)})})


def test_rocm_smi_tells_what_nothing_else_does_and_is_refused_when_it_leaves_one_out(tmp_path):
    machine = build(case("05"), tmp_path, tools=False)
    addresses = [one["bdf"] for one in case("05")["expected"]["hip"]]
    cards = {
        f"card{index}": {
            "PCI Bus": address.upper(),
            "VRAM Total Used Memory (B)": str(1000 + index),
            "GPU use (%)": "3",
        }
        for index, address in enumerate(addresses)
    }
    machine.pci(addresses[2]).joinpath("mem_info_vram_used").unlink()

    def ask(answer):
        path = script(tmp_path / "rocm-smi", f"cat <<'EOF'\n{json.dumps(answer)}\nEOF\n")
        tools = machine.options.tools.model_copy(update={"rocm_smi": str(path)})
        return amd.discover(machine.options.model_copy(update={"tools": tools}))

    node = ask(cards | {"system": {"Driver version": "6.10.5"}})
    assert node.devices[2][Reading.MEMORY_USED] == Known(1002, "rocm-smi")
    assert node.devices[1][Reading.MEMORY_USED] == Known(296747008, "sysfs")
    del cards["card4"]
    with pytest.raises(DeviceError, match=f"rocm-smi says nothing of {addresses[4]}"):
        ask(cards)


# --- processes ----------------------------------------------------------------------------------------------------


def test_the_kfd_lists_every_process_and_an_open_render_node_proves_nothing(tmp_path):
    content = case("01")
    machine = build(content, tmp_path, tools=False)
    machine.opened(4321, "/dev/dri/renderD130")
    node = amd.discover(machine.options)
    (holder,) = node.devices[2].holders
    assert (holder.pid, holder.certain, node.devices[2].holders_source) == (4321, False, None)
    assert node.devices[3].holders == ()
    # ROCr opens every render node; the KFD knows that the memory is on HIP 5 (gpu_id 16839) alone.
    machine.compute(4321, {13908: 0, 16839: 7_000_000_000})
    node = amd.discover(machine.options)
    assert [one.index for one in node.devices if one.holders] == [5]
    (holder,) = node.devices[5].holders
    assert (holder.pid, holder.memory, holder.certain) == (4321, 7_000_000_000, True)
    assert {one.holders_source for one in node.devices} == {"KFD"}


def test_a_process_is_described_from_proc(tmp_path):
    content = case("03")
    node = amd.discover(build(content, tmp_path).options)
    (stranger,) = node.devices[6].holders
    # amd-smi may not see its name ("N/A"), /proc has it.
    assert (stranger.pid, stranger.name, stranger.cgroup) == (41377, "python", "docker-bbbb")
    assert (stranger.memory, stranger.state, stranger.started) == (45_800_000_000, "S", 4711)


# --- NVIDIA -------------------------------------------------------------------------------------------------------


def nvidia_node(nvml):
    return nvidia.discover(DeviceOptions(), nvml)


def test_nvidia_devices_are_in_the_order_of_the_bus(tmp_path):
    content = case("09")
    devices = content["nvml"]["devices"]
    nvml = Nvml(devices)
    node = nvidia_node(nvml)
    wanted = [(one["cuda"], one["nvml"]) for one in content["expected"]["cuda_pci_bus_id"]]
    assert [(one.index, one.tool_index.value) for one in node.devices] == wanted
    assert [one.pci for one in node.devices] == ["0000:17:00.0", "0000:65:00.0", "0000:c4:00.0"]
    assert nvml.sessions == 0  # closed again
    random.Random(3).shuffle(devices)  # whatever NVML's own order is
    shuffled = nvidia_node(Nvml(devices))
    assert [one.uuid for one in shuffled.devices] == [one.uuid for one in node.devices]


def test_memory_in_use_tells_a_busy_nvidia_device_even_where_the_memory_of_its_process_is_hidden():
    content = case("09")
    node = nvidia_node(Nvml(content["nvml"]["devices"]))
    busy = [one.tool_index.value for one in node.devices if occupancy(node, one, HealthLimits())[0] == Occupancy.BUSY]
    assert busy == content["expected"]["busy_nvml"]
    (holder,) = node.devices[2].holders
    assert (holder.pid, holder.memory, holder.certain) == (9120, None, True)


def test_an_absent_sensor_is_unknown():
    (device, *_) = nvidia_node(Nvml(case("09")["nvml"]["devices"])).devices
    assert device[Reading.POWER] == Known(None, "not told by NVML")
    assert device[Reading.PARTITION_MODE] == Known("MIG off", "NVML")


@pytest.mark.parametrize(
    ("reasons", "throttle"),
    [
        (0, "UNTHROTTLED"),
        (0x1, "UNTHROTTLED"),
        (0x4, "UNTHROTTLED"),
        (0x21, "THROTTLED: heat"),
        (0x88, "hardware, power"),
    ],
)
def test_sensors_of_nvidia_devices_are_read_in_the_units_of_ours(reasons, throttle):
    (device,) = nvidia_node(Nvml([changed(reasons=reasons, power_mw=71_500, ecc={0: 4, 1: 2})[1]])).devices
    assert device[Reading.POWER] == Known(71.5, "NVML")
    assert (device[Reading.ECC_CORRECTABLE].value, device[Reading.ECC_UNCORRECTABLE].value) == (4, 2)
    assert throttle in device[Reading.THROTTLE].value


def test_a_device_hidden_by_the_cgroup_has_no_number():
    node = nvidia_node(Nvml(case("09")["nvml"]["devices"], hidden=[0]))
    assert [(one.index, one.tool_index.value) for one in node.devices] == [(0, 1), (1, 2)]
    assert node.sources == {"NVML": "read (hidden here: 0)"}
    far = nvidia_node(Nvml(changed(busId="00010000:01:00.0"))).devices
    assert [one.pci for one in far] == ["0000:17:00.0", "0000:c4:00.0", "10000:01:00.0"]


def changed(**fields):
    devices = case("09")["nvml"]["devices"]
    devices[1] |= fields
    return devices


@pytest.mark.parametrize(
    ("nvml", "message"),
    [
        (Nvml([], driver=False), "NVML Shared Library Not Found.*driver is not installed"),
        (Nvml([]), "no NVIDIA device"),
        (Nvml(case("09")["nvml"]["devices"], lost=[1]), "device 1 does not answer"),
        (Nvml(changed(mig=1)), "device 1 is in MIG mode"),
        (Nvml(changed(busId="65:00.0")), "no PCI address with domain"),
        (Nvml(changed(busId="00000000:17:00.0")), "one pci to several devices"),
        (Nvml(changed(uuid="GPU-11111111-aaaa-0000-0000-000000000001")), "one uuid to several devices"),
    ],
)
def test_nvidia_devices_that_are_not_there_or_cannot_be_told_apart_are_refused(nvml, message):
    with pytest.raises(DeviceError, match=message):
        nvidia_node(nvml)


@pytest.mark.parametrize(
    ("found", "normal"),
    [
        ("00000000:C4:00.0", "0000:c4:00.0"),
        ("00000003:00:04.0", "0003:00:04.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("0000:17:00.0", "0000:17:00.0"),
    ],
)
def test_bus_ids_are_written_as_the_kernel_does(found, normal):
    assert nvidia.normal_pci(found) == normal


def test_all_that_is_asked_of_nvml_is_in_the_real_module():
    text = Path(nvidia.__file__).read_text()
    names = set(re.findall(r"nvml\.(\w+)", text)) | {
        f"nvmlDeviceGet{name}" for name in re.findall(r'ask\("(\w+)"', text)
    }
    assert len(names) > 20
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []


def test_where_there_is_no_accelerator_every_source_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia, "_pynvml", lambda: Nvml([], driver=False))
    options = build({"sysfs": {"kfd_nodes": [], "drm": []}}, tmp_path, tools=False).options
    with pytest.raises(NoDeviceError) as caught:
        discover_any(options)
    for part in ("sysfs:", "amdsmi:", "amd-smi:", "rocm-smi:", "NVML"):
        assert part in str(caught.value)


def test_an_amd_map_that_cannot_be_trusted_is_not_passed_over_for_nvidia(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia, "_pynvml", lambda: Nvml(case("09")["nvml"]["devices"]))
    content = case("01")
    del gpu_nodes(content)[0]["properties"]["domain"]
    with pytest.raises(DeviceError, match="domain"):
        discover_any(build(content, tmp_path, tools=False).options)


def test_sysfs_sums_errors_over_blocks_and_counts_pending_pages(tmp_path):
    machine = build(case("01"), tmp_path, tools=False)
    ras = machine.pci("0000:05:00.0") / "ras"
    (ras / "gfx_err_count").write_text("ue: 2\nce: 5\n")
    (ras / "gpu_vram_bad_pages").write_text("0x00000001 : 0x00001000 : R\n0x00000002 : 0x00001000 : P\n")
    (first, second, *_) = amd.discover(machine.options).devices
    assert first[Reading.ECC_UNCORRECTABLE] == Known(2, "sysfs")
    assert first[Reading.ECC_CORRECTABLE] == Known(5, "sysfs")
    assert first[Reading.BAD_PAGES_PENDING] == Known(1, "sysfs")
    assert second[Reading.ECC_UNCORRECTABLE] == Known(0, "sysfs")


def test_the_name_of_a_device_comes_from_its_id_where_the_kernel_has_none(tmp_path):
    machine = build(without(case("01"), "static"), tmp_path)
    (first, second, *_) = amd.discover(machine.options).devices
    assert first[Reading.NAME] == Known("AMD Instinct MI300X", "sysfs")
    (machine.pci("0000:26:00.0") / "product_name").write_text("AMD Instinct MI300X OAM\n")
    assert amd.discover(machine.options).devices[1][Reading.NAME].value == "AMD Instinct MI300X OAM"
    assert second[Reading.NAME].value == kfd.NAMES[0x74A1] and NO_TOOL in machine.options.tools.rocm_smi
