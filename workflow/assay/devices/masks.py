"""Visibility masks: what a runtime sees under those that are set, and the one mask for a set of leased devices.

AMD: `ROCR_VISIBLE_DEVICES` picks agents (number or GPU-<unique id>, in the user's order); of those that are left,
`HIP_VISIBLE_DEVICES`, else `CUDA_VISIBLE_DEVICES`, picks by number. A list ends at its first entry that names nothing.
So the same list in both hides everything but device 0, and an engine falls back to the CPU.
https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html
`GPU_DEVICE_ORDINAL` is documented there for HIP and not read by its present source; it only ever narrows what we take.

NVIDIA: `CUDA_VISIBLE_DEVICES` picks by number or by (the beginning of) a UUID; its numbers are in the order of NVML
only under `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from assay.devices.model import Device, Reading, Vendor
from assay.errors import DeviceError

ROCR = "ROCR_VISIBLE_DEVICES"
CUDA = "CUDA_VISIBLE_DEVICES"
ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
HIP_MASKS = ("HIP_VISIBLE_DEVICES", CUDA, "GPU_DEVICE_ORDINAL")  # the first that is set counts
MASKS = {Vendor.AMD: (ROCR, *HIP_MASKS), Vendor.NVIDIA: (CUDA,)}
SLURM = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # numbers of the node, for people; the narrower first


def visible(devices: Sequence[Device], env: Mapping[str, str]) -> tuple[Device, ...]:
    """What a runtime started under `env` would see, in its order. `devices` is in the order without masks."""
    pool = tuple(devices)
    for name, mask in _layers(devices, _masks(devices, env)):
        pool, _ = _apply(name, mask, pool)
    return pool


def candidates(devices: Sequence[Device], env: Mapping[str, str]) -> tuple[Device, ...]:
    """The devices that this job may use: all, less what masks hide and SLURM did not give.

    Raises:
        DeviceError: masks are stacked, one names a device that is not there or leaves none, or what SLURM gave cannot
            be told.
    """
    if not devices:
        raise DeviceError("there is no device to choose from")
    given = next((env[name].split(",") for name in SLURM if env.get(name)), None)
    masks = _unstacked(_masks(devices, env), slurm=given is not None)
    pool = tuple(devices)
    for name, mask in _layers(devices, masks):
        _check_order(name, env, pool)
        pool, wrong = _apply(name, mask, pool)
        if wrong is not None:
            raise DeviceError(
                f"{name}={mask!r}: {wrong!r} names none of the {len(devices)} devices that are there, or one twice. "
                "Runtimes drop it and all that follow, and with none left they fall back to the CPU. Mend or unset it"
            )
    if given is not None and len(given) != len(pool):
        raise DeviceError(
            f"SLURM gave this job {len(given)} devices ({','.join(given)}), and {len(pool)} can be seen: "
            f"{', '.join(map(str, pool))}. Which of them are ours cannot be told; SLURM must set a mask "
            "(gres.conf: Flags) or constrain devices (cgroup.conf: ConstrainDevices)"
        )
    return pool


def mask_env(chosen: Sequence[Device]) -> dict[str, str]:
    """The environment under which a server sees `chosen`, in this order, and nothing else.

    AMD: by unique id, which holds in every container that gets the devices; by number where one has no id of its own.
    NVIDIA: by number in the order of the bus, because engines parse the list as numbers
    (https://github.com/vllm-project/vllm/issues/13815). Numbers hold for a server that is given every device that we
    see. It must be the only mask: see `without_masks`.

    Args:
        chosen: devices of one vendor.

    Raises:
        DeviceError: there is no device.
    """
    if not chosen:
        raise DeviceError("no device is chosen, and a server without one would fall back to the CPU")
    if chosen[0].vendor == Vendor.NVIDIA:
        return {ORDER: BY_BUS, CUDA: ",".join(str(device.index) for device in chosen)}
    uuids = [device.uuid for device in chosen if device.uuid is not None]
    numbers = [str(device.index) for device in chosen]
    return {ROCR: ",".join(uuids if len(uuids) == len(chosen) else numbers)}


def without_masks(env: Mapping[str, str]) -> dict[str, str]:
    """`env` less every mask, so that ours is the only one."""
    masks = {name for names in MASKS.values() for name in names}
    return {name: value for name, value in env.items() if name not in masks}


def _masks(devices: Sequence[Device], env: Mapping[str, str]) -> dict[str, str]:
    """The masks that are set. HIP takes an empty one as none; empty, ROCR's and CUDA's own hide everything."""
    vendor = devices[0].vendor if devices else Vendor.AMD
    ignored = HIP_MASKS if vendor == Vendor.AMD else ()
    return {name: env[name] for name in MASKS[vendor] if name in env and (env[name] or name not in ignored)}


def _layers(devices: Sequence[Device], masks: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The masks that count, in the order in which they are applied."""
    amd = bool(devices) and devices[0].vendor == Vendor.AMD
    for names in ((ROCR,), HIP_MASKS) if amd else ((CUDA,),):
        yield from [(name, masks[name]) for name in names if name in masks][:1]


def _unstacked(masks: Mapping[str, str], slurm: bool) -> Mapping[str, str]:
    """One mask at most. SLURM states one allocation in several masks, which is then meant once."""
    if len(masks) < 2:
        return masks
    if slurm and len(set(masks.values())) == 1:
        return dict(list(masks.items())[:1])
    raise DeviceError(
        f"{' and '.join(f'{name}={mask}' for name, mask in masks.items())} are set at once: one picks from what the "
        "other leaves, and what an engine then sees is seldom what was meant. Unset all but one"
    )


def _check_order(name: str, env: Mapping[str, str], pool: Sequence[Device]) -> None:
    unlike = len({device[Reading.NAME].value for device in pool}) > 1
    numbers = any(token.strip().isdigit() for token in env[name].split(","))
    if pool[0].vendor == Vendor.NVIDIA and unlike and numbers and env.get(ORDER) != BY_BUS:
        raise DeviceError(
            f"{name}={env[name]} has numbers, and CUDA numbers unlike devices fastest first, in an order that cannot "
            f"be told: set {ORDER}={BY_BUS}, or use UUIDs"
        )


def _apply(name: str, mask: str, pool: Sequence[Device]) -> tuple[tuple[Device, ...], str | None]:
    """The devices of `pool` that a mask picks, and its first entry that picks none of them, or one twice."""
    picked: list[Device] = []
    for token in map(str.strip, mask.split(",")):
        if token.isdigit():
            hits = list(pool[int(token) : int(token) + 1])
        else:
            hits = [device for device in pool if _means(name, token, device)]
        if len(hits) != 1 or hits[0] in picked:
            return tuple(picked), token
        picked += hits
    return tuple(picked), None


def _means(name: str, token: str, device: Device) -> bool:
    """Whether a UUID in mask `name` means this device. CUDA takes the beginning of one, ROCr all of it, HIP none."""
    if device.uuid is None or not token.startswith("GPU-"):
        return False
    if device.vendor == Vendor.NVIDIA:
        return device.uuid.startswith(token)
    return name == ROCR and device.uuid == token
