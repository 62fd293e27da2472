"""A digest of the code a stage runs, so that a changed metric reruns its stage and a reformat reruns nothing.

Snakemake sees neither imported modules nor the content of scripts (only their mtime). Rules put this digest into
`params`; the digest follows imports from the stage's script through every module of ours.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).parent
_ROOT = _PACKAGE.parent

MODALITIES = ("text", "asr", "tts")
PICKED = (
    "references",
    "judging",
    "scoring",
    "verdicts",
    "report",
)  # packages where each modality has a module of its name


@functools.cache
def fingerprint(script: str | Path, modality: str | None = None) -> str:
    """Digest (16 hex digits) of the parsed code of `script` and of every `assay` module it imports, however indirectly.

    Comments, formatting and docstrings do not count; nor, for a stage that picks its module by `modality`, what only
    other modalities' modules of `PICKED` import. A file is read once in the life of a process.
    """
    seen: dict[str, str] = {}
    todo = [Path(script)]
    while todo:
        path = todo.pop()
        key = path.name if path == Path(script) else path.relative_to(_ROOT).as_posix()
        if key not in seen:
            seen[key], imported = _parse(path)
            todo += [found for name in imported if not _of_another(name, modality) and (found := _module_file(name))]
    return hashlib.sha256("\n".join(f"{name} {seen[name]}" for name in sorted(seen)).encode()).hexdigest()[:16]


def command_fingerprint(argv: Sequence[str]) -> str | None:
    """Digest of the module of ours that a command runs (`-m assay.…`); None where it runs none."""
    for word in argv:
        name = word if f"{word}.".startswith(f"{_PACKAGE.name}.") else None
        if name is not None and (found := _module_file(f"{name}.__main__") or _module_file(name)):
            return fingerprint(found)
    return None


@functools.cache
def _parse(path: Path) -> tuple[str, tuple[str, ...]]:
    """Digest of one file's code, and the names of the modules it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and _is_text(body[0].value):
            body[0] = ast.Pass()
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(imported)


def _of_another(name: str, modality: str | None) -> bool:
    """Whether a module (its full name) is one that a stage of this modality never picks."""
    _, room, module = (*name.split("."), "", "")[:3]
    return modality is not None and room in PICKED and module in MODALITIES and module != modality


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _module_file(name: str) -> Path | None:
    if name.split(".")[0] != "assay":
        return None
    path = _ROOT.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None
