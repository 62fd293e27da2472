"""Proof that a server runs the checkout it was to be served from.

An editable install or a stray PYTHONPATH loads another tree without a word, and two trees compared back to back are
then one. Python modules are proven by the file that the server's interpreter finds; extension modules by the files that
the kernel has mapped into its processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

SUFFIX = ".so"


class Measured(Protocol):
    """The part of `assay.engines.identity.Identity` that is judged here."""

    @property
    def module_file(self) -> str | None:
        """File of the module that serves."""

    @property
    def native(self) -> dict[str, list[str]] | None:
        """Extension module -> files of it that are mapped."""


def native_modules(
    pids: Iterable[int], names: Sequence[str], proc_root: str | Path = "/proc"
) -> dict[str, list[str]] | None:
    """Extension module -> files of it that are mapped into any of the processes; null when none could be looked at.

    Args:
        pids: a server's processes; one that ended in the meantime is passed over.
        names: extension modules, as they are imported.
        proc_root: where the kernel shows its processes.
    """
    if not names:
        return {}
    texts = [text for pid in pids if (text := _maps(Path(proc_root, str(pid), "maps"))) is not None]
    if not texts:
        return None
    # Address, permissions, offset, device, inode, path: https://man7.org/linux/man-pages/man5/proc_pid_maps.5.html
    fields = (line.split(maxsplit=5) for text in texts for line in text.splitlines())
    paths = sorted({parts[5].strip() for parts in fields if len(parts) == 6})
    return {name: [path for path in paths if _belongs(Path(path), name)] for name in names}


def wrong_tree(identity: Measured, plan: Mapping[str, Any]) -> str | None:
    """Why a server does not run the checkout of its plan, or None. What cannot be proven is not believed.

    Args:
        identity: as measured from the running server.
        plan: its serve plan; without `tree` there is nothing to prove.
    """
    tree = plan["tree"]
    if tree is None:
        return None
    root, spec = Path(tree["path"]).resolve(), plan["identity"]
    whose = f"arm '{plan['arm']}' is to be served from checkout '{tree['name']}' ({root}), but"
    remedy = (
        f"Install the checkout into its own environment (pip install -e . with {root}/.venv/bin/python), or correct "
        f"`trees.{tree['name']}`."
    )
    if identity.module_file is None:
        return f"{whose} nothing tells where its server takes module '{spec['module']}' from. {remedy}"
    if not _inside(identity.module_file, root):
        return f"{whose} its server takes module '{spec['module']}' from {identity.module_file}. {remedy}"
    for name in spec["native"]:
        built = own_build(root, name)
        if built is None:
            continue
        if identity.native is None:
            return f"{whose} nothing tells where its server takes '{name}' from, which it has a build of ({built})."
        if foreign := [path for path in identity.native[name] if not _inside(path, root)]:
            return f"{whose} its server has loaded {foreign[0]} instead of the checkout's own {built}. {remedy}"
    return None


def own_build(root: Path, name: str) -> Path | None:
    """A file of extension module `name` built in the checkout, if it has one."""
    return next((path for path in sorted(root.rglob(f"*{SUFFIX}")) if _belongs(path, name)), None)


def _belongs(path: Path, name: str) -> bool:
    """Whether `path` is a file of extension module, or of a package, `name`."""
    return path.suffix == SUFFIX and (path.name.split(".")[0] == name or path.parent.name == name)


def _inside(path: str, root: Path) -> bool:
    return Path(path).resolve().is_relative_to(root)


def _maps(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
