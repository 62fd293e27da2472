"""Whether the map in config/configs.yaml covers a tree of deployment files, and the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from assay.config import ConfigEntry, deployment_of
from assay.errors import ConfigError

SUFFIXES = {".yaml", ".yml", ".json", ".toml"}


def compare_tree(configs: Mapping[str, ConfigEntry], tree: Path) -> list[str]:
    """One message for every deployment file that is not in the map, and every mapped name that has no file.

    Args:
        configs: the map, by name.
        tree: directory of deployment files (searched recursively); a file's name without suffix is its config's name.

    Raises:
        ConfigError: `tree` is not a directory, or holds no deployment file.
    """
    if not tree.is_dir():
        raise ConfigError(f"{tree} is not a directory; --tree takes the directory that holds the deployment files")
    files = {path.stem: path for path in sorted(tree.rglob("*")) if path.suffix in SUFFIXES}
    if not files:
        raise ConfigError(f"{tree} holds no deployment file ({', '.join(sorted(SUFFIXES))})")
    mapped = {*configs, *(deployment_of(name, entry) for name, entry in configs.items())}
    unmapped = [
        f"{name}: {path} is not in the map; add an entry to config/configs.yaml (family and arm, or why unsupported)"
        for name, path in files.items()
        if name not in mapped
    ]
    gone = [
        f"{name}: in the map, but {tree} holds no such deployment; remove the entry, or mark it `deployment: false`"
        for name, entry in configs.items()
        if entry.deployment is True and name not in files
    ]
    return unmapped + gone
