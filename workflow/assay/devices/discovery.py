"""The accelerators of a site."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from assay.config import DeviceOptions
from assay.devices import amd, nvidia
from assay.devices.model import Node, Reading, Vendor
from assay.errors import DeviceError, NoDeviceError


def discover(vendor: Vendor, options: DeviceOptions, need: Collection[Reading] = tuple(Reading)) -> Node:
    """The devices of one vendor, in the order of their runtime, masks not yet applied. See `amd` and `nvidia`.

    Raises:
        NoDeviceError: there is none.
        DeviceError: which is which cannot be told, or a root of the options is not there.
    """
    for name in ("sysfs_root", "proc_root"):
        root = getattr(options, name)
        if not Path(root).is_dir():
            raise DeviceError(
                f"{name} is '{root}', which is no directory, so nothing could be read there; correct `devices.{name}` "
                f"in the site's file, or --{name.replace('_', '-')}"
            )
    return amd.discover(options, need) if vendor == Vendor.AMD else nvidia.discover(options)


def discover_any(options: DeviceOptions) -> Node:
    """The devices of whichever vendor has some here.

    Raises:
        NoDeviceError: there is none; what each source said is in the message.
        DeviceError: there are some, and which is which cannot be told.
    """
    said = []
    for vendor in Vendor:
        try:
            return discover(vendor, options)
        except NoDeviceError as error:
            said.append(f"{vendor}: {error}")
    raise NoDeviceError("no accelerator is found\n  " + "\n  ".join(said))
