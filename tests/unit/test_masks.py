"""What runtimes see under masks, what a job may use, and the one mask for what it leased."""

import pytest
from gpu import Nvml, build, case
from hypothesis import given
from hypothesis import strategies as st

from assay.config import DeviceOptions
from assay.devices import amd, nvidia
from assay.devices.masks import candidates, mask_env, visible, without_masks
from assay.errors import DeviceError

ROCR, HIP, CUDA, ORDINAL = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Case 02: eight devices whose HIP order is not that of the bus."""
    return amd.discover(build(case("02"), tmp_path_factory.mktemp("x"), tools=False).options).devices


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory):
    """Case 04: sixteen partitions of two PCI devices."""
    return amd.discover(build(case("04"), tmp_path_factory.mktemp("x"), tools=False).options).devices


@pytest.fixture(scope="module")
def three():
    """Case 09: an L4 and two H200."""
    return nvidia.discover(DeviceOptions(), Nvml(case("09")["nvml"]["devices"])).devices


def indices(devices):
    return [device.index for device in devices]


def test_masks_of_a_restricted_container_compose_as_worked_out_by_hand(tmp_path):
    content = case("07")
    devices = amd.discover(build(content, tmp_path).options).devices
    rocr = visible(devices, {ROCR: content["env"][ROCR]})
    assert [(one.node, one.address) for one in rocr] == [
        (one["node"], one["bdf"]) for one in content["expected"]["after_rocr"]
    ]
    both = visible(devices, content["env"])
    assert [(one.node, one.address) for one in both] == [
        (one["node"], one["bdf"]) for one in content["expected"]["hip"]
    ]
    with pytest.raises(DeviceError, match="set at once"):
        candidates(devices, content["env"])


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({HIP: "3,1"}, [3, 1]),
        ({CUDA: "3,1"}, [3, 1]),
        ({HIP: "5", CUDA: "3,1"}, [5]),  # HIP's own goes before CUDA's
        ({ORDINAL: "2"}, [2]),
        ({ROCR: "4,5,6", HIP: "2"}, [6]),  # HIP counts what ROCR left
        ({ROCR: "1", HIP: "1"}, []),  # stacked: the engine falls back to the CPU
        ({HIP: "0,9,1"}, [0]),  # ends at the first that names nothing
        ({HIP: "0,0,1"}, [0]),
        ({HIP: "-1"}, []),
        ({HIP: ""}, [0, 1, 2, 3, 4, 5, 6, 7]),  # to HIP an empty mask is none
        ({ROCR: ""}, []),
        ({HIP: " 2 , 3 "}, [2, 3]),
        # unique ids of nodes 4 and 2
        ({ROCR: "GPU-3c4d5e6f708192a3,GPU-1a2b3c4d5e6f7081"}, [2, 0]),
        ({HIP: "GPU-3c4d5e6f708192a3"}, []),
    ],
)
def test_hip_sees_what_its_masks_leave(eight, env, seen):
    assert indices(visible(eight, env)) == seen


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({CUDA: "2,0"}, [2, 0]),
        ({CUDA: "GPU-3333,GPU-11111111-aaaa-0000-0000-000000000001"}, [2, 0]),
        ({CUDA: "GPU-"}, []),  # the beginning of more than one
        ({CUDA: ""}, []),
        ({HIP: "1", ROCR: "1"}, [0, 1, 2]),  # not read by CUDA
    ],
)
def test_cuda_sees_what_its_mask_leaves(three, env, seen):
    assert indices(visible(three, env)) == seen


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({HIP: "0", ROCR: "0"}, f"{ROCR}=0 and {HIP}=0 are set at once"),
        ({CUDA: "0", ROCR: "0"}, f"{ROCR}=0 and {CUDA}=0 are set at once"),
        ({HIP: "0", CUDA: "1"}, f"{HIP}=0 and {CUDA}=1 are set at once"),
        ({HIP: "0,8"}, f"{HIP}='0,8': '8' names none of the 8 devices"),
        ({HIP: "1,1"}, "'1' names none .* or one twice"),
        ({ROCR: "GPU-ffffffffffffffff"}, "'GPU-ffffffffffffffff' names none"),
        ({ROCR: ""}, f"{ROCR}='': '' names none"),
        ({HIP: "x"}, "'x' names none"),
    ],
)
def test_masks_that_cannot_mean_what_they_say_are_refused(eight, env, message):
    with pytest.raises(DeviceError, match=message):
        candidates(eight, env)


def test_a_mask_of_ours_may_be_used_by_whoever_set_it(eight):
    assert indices(candidates(eight, {HIP: "6,2"})) == [6, 2]
    assert indices(candidates(eight, {ROCR: "6,2", HIP: ""})) == [6, 2]


def test_an_id_that_partitions_share_picks_none(sixteen):
    with pytest.raises(DeviceError, match="names none"):
        candidates(sixteen, {ROCR: "GPU-bb22cc33dd44ee55"})


# --- SLURM --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "given"),
    [
        ({"SLURM_JOB_GPUS": "2,3", ROCR: "2,3"}, [2, 3]),
        # without AutoDetect SLURM sets every vendor's mask to the same list
        ({"SLURM_JOB_GPUS": "2,3", ROCR: "2,3", CUDA: "2,3", ORDINAL: "2,3"}, [2, 3]),
        # a step has part of its job
        ({"SLURM_JOB_GPUS": "2,3", "SLURM_STEP_GPUS": "3", ROCR: "3"}, [3]),
        ({"SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7"}, [0, 1, 2, 3, 4, 5, 6, 7]),  # the whole node
        # the cgroup hides the others, so the mask counts from 0
        ({"SLURM_JOB_GPUS": "1,2,3,4,5,6,7,8", ROCR: "0,1,2,3,4,5,6,7"}, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_only_what_slurm_gave_is_a_candidate(eight, env, given):
    assert indices(candidates(eight, env)) == given


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SLURM_JOB_GPUS": "2,3"}, "SLURM gave this job 2 devices .*, and 8 can be seen.*ConstrainDevices"),
        ({"SLURM_JOB_GPUS": "2,3", ROCR: "2"}, "gave this job 2 devices .*, and 1 can be seen"),
        ({"SLURM_JOB_GPUS": "2,3", ROCR: "2,3", HIP: "0"}, "set at once"),
    ],
)
def test_an_allocation_that_cannot_be_told_is_refused(eight, env, message):
    with pytest.raises(DeviceError, match=message):
        candidates(eight, env)


# --- NVIDIA's order -----------------------------------------------------------------------------------------------


def test_numbers_of_unlike_nvidia_devices_need_the_order_of_the_bus(three):
    with pytest.raises(DeviceError, match=r"fastest first.*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        candidates(three, {CUDA: "0"})
    assert indices(candidates(three, {CUDA: "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})) == [0]
    assert indices(candidates(three, {CUDA: "GPU-22222222"})) == [1]
    assert indices(candidates(three[1:], {CUDA: "1"})) == [2]  # two alike


# --- ours ---------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_under_our_mask_a_server_sees_the_leased_devices_and_nothing_else(eight, sixteen, three, data):
    devices = data.draw(st.sampled_from([eight, sixteen, three]))
    chosen = data.draw(st.lists(st.sampled_from(devices), min_size=1, unique_by=lambda one: one.index))
    stray = {HIP: "0", ROCR: "1", CUDA: "0", ORDINAL: "0", "PATH": "/bin"}
    env = without_masks(stray) | mask_env(chosen)
    assert env["PATH"] == "/bin"
    assert visible(devices, env) == candidates(devices, env) == tuple(chosen)


def test_our_mask_is_one_and_by_unique_id_where_there_is_one(eight, sixteen, three):
    assert mask_env([eight[2], eight[0]]) == {ROCR: "GPU-3c4d5e6f708192a3,GPU-1a2b3c4d5e6f7081"}
    assert mask_env([sixteen[3], sixteen[9]]) == {ROCR: "3,9"}
    assert mask_env([three[1]]) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", CUDA: "1"}


def test_no_device_is_no_mask(eight):
    with pytest.raises(DeviceError, match="fall back to the CPU"):
        mask_env([])
    with pytest.raises(DeviceError, match="no device"):
        candidates([], {})
