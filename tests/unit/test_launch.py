"""From a serve plan and leased devices to what is started."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from gpu import Nvml, build, case
from sites import DIGEST, SITES, checkouts, on, pinned

from assay.config import DeviceOptions, ServedConfig, SiteContainers
from assay.devices import amd, nvidia
from assay.devices.hold import Held
from assay.devices.masks import MASKS, mask_env
from assay.engines.apptainer import process_launch
from assay.engines.container import ContainerLaunch, Mount
from assay.engines.launch import clear_up, launch
from assay.engines.plan import serve_plan
from assay.engines.process import ProcessLaunch
from assay.engines.server import StartFailure, free_ports

ROCR, CUDA, ORDER = "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
# What a user's shell may hold: every mask there is, and what must go through.
BASE = {"PATH": "/bin", "HOME": "/here"} | {name: "7" for names in MASKS.values() for name in names}
PAIRS = [(site, arm) for site in SITES for arm in on(site).site.arms if on(site).arms[arm].gpus]
CONTAINED = [(site, arm) for site, arm in PAIRS if on(site).arms[arm].container]
PROCESSES = sorted(set(PAIRS) - set(CONTAINED))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the workflow runs: relative paths of a plan mean something here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def devices(tmp_path_factory):
    """Two devices of each kind of site, the higher number first; case 02 is an AMD node, case 09 an NVIDIA one."""
    machine = build(case("02"), tmp_path_factory.mktemp("x"), tools=False)
    return {
        "amd": amd.discover(machine.options).pick([3, 1]),
        "nvidia": nvidia.discover(DeviceOptions(), Nvml(case("09")["nvml"]["devices"])).pick([2, 1]),
    }


def plan_of(site, arm, folder, **container):
    """The plan of an arm for two devices, on a site whose containers may be set otherwise."""
    config = pinned(on(site, trees=checkouts(folder)))
    entry = ServedConfig(
        family="qwen3_5_9b", arm=arm, dtype=config.arms[arm].dtypes[0], deployment="qwen3_5_9b", gpus=2
    )
    changes = {"container": SiteContainers(**container)} if container else {}
    there = config.site.model_copy(update=changes)
    return serve_plan(config.model_copy(update={"configs": {"x": entry}, "site": there}), "x")


def started(plan, devices, folder=Path("instance")):
    """The launch of a plan with the devices of its kind leased."""
    chosen = devices[plan["device"]]
    return launch(plan, BASE, folder, Held(chosen, mask_env(chosen)))


def masks_of(env):
    """The masks among some variables."""
    return {name: env[name] for name in (*BASE.keys() - {"PATH", "HOME"}, ORDER) if name in env}


# --- containers ---------------------------------------------------------------------------------------------------


def test_a_container_of_an_amd_node_is_launched_as_planned_to_the_last_field(folder, devices):
    plan = plan_of("mi300x", "vllm-aiter", folder)
    ids = [device.uuid for device in devices["amd"]]
    assert len(set(ids)) == 2 and all(one.startswith("GPU-") for one in ids)
    caches = folder / f"resources/caches/vllm-aiter/{DIGEST.replace(':', '-')}"
    kinds = ["vllm", "torch_compile", "triton", "miopen", "aiter"]
    assert started(plan, devices) == ContainerLaunch(
        argv=tuple(plan["argv"]),
        env=plan["env"] | {ROCR: f"{ids[0]},{ids[1]}"},
        host="127.0.0.1",
        start_limit_s=plan["limits"]["start_limit_s"],
        stop_grace_s=plan["limits"]["stop_grace_s"],
        config="x",
        runtime="docker",
        repository="vllm/vllm-openai-rocm",
        digest=DIGEST,
        tag="v0.31.0",
        container_port=8000,
        mounts=(
            Mount(str(folder / "resources/qwen3_5_9b"), "/models/qwen3_5_9b", read_only=True),
            *(Mount(str(caches / kind), f"/caches/{kind}", read_only=False) for kind in kinds),
        ),
        devices=("/dev/kfd", "/dev/dri"),
        gpus=(),
        shm_bytes=32 * 2**30,
        ulimits={"memlock": -1, "stack": 67108864},
        ipc_host=False,
        host_network=False,
        user=None,
        group_add=("video", "render"),
        cap_add=("SYS_PTRACE",),
        security_opt=("seccomp=unconfined",),
        memory_bytes=None,
        pids_limit=None,
    )


@pytest.mark.parametrize(("site", "arm"), CONTAINED)
def test_every_arm_in_a_container_sees_its_devices_by_one_way_and_nothing_of_the_users_masks(
    site, arm, folder, devices
):
    plan = plan_of(site, arm, folder)
    made, spec = started(plan, devices), plan["container"]
    assert isinstance(made, ContainerLaunch) and made.digest == DIGEST and made.runtime == spec["runtime"]
    assert "PATH" not in made.env and "HOME" not in made.env
    if plan["device"] == "amd":
        assert masks_of(made.env) == mask_env(devices["amd"]) and made.gpus == ()
        assert made.devices == ("/dev/kfd", "/dev/dri")
    else:
        assert masks_of(made.env) == {ORDER: "PCI_BUS_ID"}
        assert made.gpus == tuple(device.uuid for device in devices["nvidia"]) and made.devices == ()
    assert [asdict(mount) for mount in made.mounts] == [
        item | {"source": str(folder / item["source"])} for item in spec["mounts"]
    ]


CHANGES = {
    "runtime": "apptainer",
    "repository": "other/engine",
    "digest": f"sha256:{'cd' * 32}",
    "tag": "v2",
    "container_port": 9,
    "devices": ["/dev/other"],
    "shm_bytes": 9,
    "ulimits": {"stack": 9},
    "ipc_host": True,
    "host_network": True,
    "user": "9:9",
    "group_add": ["other"],
    "cap_add": ["OTHER"],
    "security_opt": ["other"],
    "memory_bytes": 9,
    "pids_limit": 9,
}


def test_whatever_a_plan_says_of_a_container_reaches_its_launch(folder, devices):
    plan = plan_of("mi300x", "vllm", folder)
    assert plan["container"].keys() == {*CHANGES, "mounts"}
    made = started(plan, devices)
    for key, value in CHANGES.items():
        assert value != plan["container"][key]
        changed = started({**plan, "container": {**plan["container"], key: value}}, devices)
        given = tuple(value) if isinstance(value, list) else value
        assert changed == replace(made, **{key: given}), key


def test_apptainer_shows_all_gpus_so_there_the_mask_chooses_among_them(folder, devices):
    plan = plan_of("h100", "vllm", folder, runtime="apptainer")
    made = started(plan, devices)
    assert masks_of(made.env) == {ORDER: "PCI_BUS_ID", CUDA: "2,1"} and len(made.gpus) == 2
    run = process_launch(made, BASE)
    assert "--nv" in run.argv and run.env[f"APPTAINERENV_{CUDA}"] == "2,1"
    made = started(plan_of("mi325x", "vllm", folder / "amd"), devices)
    assert made.runtime == "apptainer" and masks_of(made.env) == mask_env(devices["amd"])


def test_links_among_the_weights_lead_somewhere_in_the_container_too(folder, devices):
    weights, store, blobs = folder / "resources/qwen3_5_9b", folder / "store", folder / "blobs"
    for made in (weights, store, blobs):
        made.mkdir(parents=True)
    (blobs / "b").write_text("x")
    (store / "model").symlink_to("../blobs/b")
    (weights / "model.safetensors").symlink_to(store / "model")
    (weights / "config.json").write_text("{}")
    plan = plan_of("mi300x", "vllm", folder)
    extra = started(plan, devices).mounts[len(plan["container"]["mounts"]) :]
    assert extra == (Mount(str(blobs), str(blobs)), Mount(str(store), str(store)))
    (weights / "model.safetensors").unlink()
    assert len(started(plan, devices).mounts) == len(plan["container"]["mounts"])


def test_containers_of_killed_runs_are_looked_for_only_where_they_could_hold_a_leased_device(
    folder, devices, monkeypatch
):
    def connect():
        raise StartFailure("engine_unreachable", "no engine")

    monkeypatch.setattr("assay.engines.images.connect", connect)
    plan = plan_of("mi300x", "vllm", folder)
    with pytest.raises(StartFailure, match="no engine"):
        clear_up(plan)
    clear_up(plan | {"gpus": 0})
    clear_up(plan | {"container": None})
    clear_up(plan_of("mi325x", "vllm", folder / "x"))


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("site", "arm"), PROCESSES)
def test_a_process_sees_its_devices_by_the_mask_of_the_lease_and_by_no_other(site, arm, folder, devices):
    plan = plan_of(site, arm, folder)
    made = started(plan, devices, folder / "one")
    assert isinstance(made, ProcessLaunch)
    assert masks_of(made.env) == mask_env(devices[plan["device"]])
    assert (made.env["PATH"], made.env["HOME"]) == ("/bin", "/here")
    assert made.env.items() >= {"TMPDIR": str(folder / "one"), "MSTAR_SHM_ARENA": "1"}.items()
    assert f"--socket-path-prefix={folder}/one/sockets/" in made.argv and "--port={port}" in made.argv
    assert made.host == plan["host"]
    assert (made.start_limit_s, made.stop_grace_s) == tuple(plan["limits"].values())


def test_two_instances_have_side_ports_of_their_own(folder, devices):
    plan = plan_of("mi300x", "mstar", folder)
    plan = plan | {"side_ports": ["mooncake", "second"], "env": plan["env"] | {"SECOND": "{side_port_second}"}}

    def ports(made):
        (first,) = (word.partition("=")[2] for word in made.argv if word.startswith("--mooncake-port="))
        return int(first), int(made.env["SECOND"])

    found = [*ports(started(plan, devices)), *ports(started(plan, devices))]
    assert len(set(found)) == 4 and min(found) > 1023


def test_ports_that_are_asked_for_together_are_never_the_same():
    # Asked for one by one, 400 of the some 14,000 that Linux draws from are all different once in 300 times.
    assert len(set(free_ports("127.0.0.1", 400))) == 400
    assert free_ports("127.0.0.1", 0) == []


def test_a_server_without_devices_is_launched_as_planned_in_the_environment_as_it_is():
    plan = serve_plan(on("embedded"), "smollm2_135m_embedded")
    assert launch(plan, BASE, Path("instance"), Held()) == ProcessLaunch(
        argv=tuple(plan["argv"]),
        env=BASE | plan["env"],
        host="127.0.0.1",
        start_limit_s=plan["limits"]["start_limit_s"],
        stop_grace_s=plan["limits"]["stop_grace_s"],
    )
