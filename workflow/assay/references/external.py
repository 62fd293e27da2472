"""A reference that is a command: the model's own package, in an environment of its own.

It gets requests as JSON lines (`{"id", ...}`) and fills a folder: an audio file for each, and `manifest.json` with
`{"audio": [{"id", "file"}], "versions": {distribution: version}}`. `assay.drivers` are such commands.
"""

from __future__ import annotations

import json
import logging
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.environments import clean_environment
from assay.errors import MediaError, ReferenceFailure
from assay.media.audio import Container, decode
from assay.sources.pypi import decisive_line

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_SHOWN = 5  # of a kind of problem, by name


@dataclass(frozen=True)
class Spoken:
    """What a command made."""

    files: dict[str, Path]  # id -> its audio file
    versions: dict[str, str]  # of the distributions that made it


def run(argv: Sequence[str], env: Mapping[str, str], requests: Sequence[Mapping[str, Any]], folder: Path) -> Spoken:
    """Run a reference command, and check that it made one readable audio file for each request and nothing else.

    Args:
        argv: the command; `{requests}` and `{output}` in it are filled here.
        env: environment variables added to ours, less what leads another interpreter to our modules.
        requests: dicts with at least `id`.
        folder: an empty folder that outlives the files' use.

    Raises:
        ReferenceFailure: it cannot be started or fails, or a file is missing, unreadable or nobody's; all are named.
    """
    asked, output = folder / "requests.jsonl", folder / "output"
    asked.write_text("".join(json.dumps(request, ensure_ascii=False) + "\n" for request in requests), encoding="utf-8")
    output.mkdir()
    command = [word.replace("{requests}", str(asked)).replace("{output}", str(output)) for word in argv]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment() | dict(env))
    except OSError as error:
        raise ReferenceFailure(f"the reference command cannot be started: {command[0]}: {error.strerror}") from None
    log.info("%s: exit status %d\n%s%s", command[0], done.returncode, done.stdout, done.stderr)
    if done.returncode != 0:
        why = decisive_line(done.stdout + done.stderr)
        raise ReferenceFailure(f"the reference command ended with exit status {done.returncode}: {why}")
    listed, versions = _read_manifest(output / MANIFEST)
    if problems := _problems([request["id"] for request in requests], listed, output):
        raise ReferenceFailure(f"the reference command did not answer every item once: {'; '.join(problems)}")
    return Spoken({name: output / file for name, file in listed}, versions)


def _read_manifest(path: Path) -> tuple[list[tuple[str, str]], dict[str, str]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [(str(entry["id"]), str(entry["file"])) for entry in content["audio"]], dict(content["versions"])
    except FileNotFoundError:
        raise ReferenceFailure(f"the reference command wrote no {path.name} into its output folder") from None
    except (ValueError, KeyError, TypeError) as error:
        expected = '{"audio": [{"id", "file"}], "versions": {}}'
        raise ReferenceFailure(
            f"the reference command's {path.name} is not as expected ({expected}): {error!r}"
        ) from None


def _problems(wanted: Sequence[str], listed: Sequence[tuple[str, str]], output: Path) -> list[str]:
    names = Counter(name for name, _ in listed)
    files = Counter(file for _, file in listed)
    there = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()} - {MANIFEST}
    unreadable = [why for name, file in listed if file in there and (why := _unreadable(name, output / file))]
    return [
        *_told("without a file", (name for name in wanted if name not in names)),
        *_told("with several files", (name for name, count in names.items() if count > 1)),
        *_told("never asked for", (name for name in names if name not in wanted)),
        *_told("whose file is not there", (f"{name} ({file})" for name, file in listed if file not in there)),
        *_told("that share a file", (file for file, count in files.items() if count > 1)),
        *_told("that cannot be read", unreadable),
        *_told("in files that the manifest does not name", (file for file in there if file not in files)),
    ]


def _told(what: str, names: Any) -> list[str]:
    found = sorted(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return [f"{len(found)} {what}: {', '.join(found[:_SHOWN])}{more}"] if found else []


def _unreadable(name: str, path: Path) -> str | None:
    try:
        decode(path.read_bytes(), Container(path.suffix.lstrip(".")))
    except ValueError:
        return f"{name} ({path.name} is none of {', '.join(f'.{kind}' for kind in Container)})"
    except MediaError as error:
        return f"{name} ({error})"
    return None
