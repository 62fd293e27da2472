"""Files of one immutable revision of a Hugging Face repository."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from assay.config import HuggingFaceSource
from assay.errors import SourceError
from assay.sources.manifest import check_hashes


def fetch(name: str, source: HuggingFaceSource, directory: Path) -> None:
    """Put the listed files of the pinned revision into `directory`.

    Raises:
        SourceError: the revision can move, a hash is not filled in, the hub cannot be reached, or a file is missing or
            differs.
    """
    revision = immutable_revision(name, source)
    if source.unpinned:
        raise SourceError(
            f"source '{name}': `files` in config/sources.yaml has no SHA-256 for {', '.join(source.unpinned)}. Fill in "
            f"those that the page of each file at {source.repo} shows (of a small file: `sha256sum` of a download)."
        )
    for path, digest in sorted(source.files.items()):
        _download(name, source.repo, path, revision, directory)
        check_hashes(name, directory, {path: str(digest)})
    shutil.rmtree(directory / ".cache", ignore_errors=True)  # the hub client's own notes


def immutable_revision(name: str, source: HuggingFaceSource) -> str:
    """The pinned commit (40 hex digits). Raises SourceError for a branch, a tag or null."""
    if source.revision is None or not re.fullmatch(r"[0-9a-f]{40}", source.revision):
        found = "null" if source.revision is None else f"'{source.revision}', which can move"
        raise SourceError(
            f"source '{name}': `revision` in config/sources.yaml is {found}. Fill in the 40-digit commit of "
            f"{source.repo} (its page lists them under History, or `git ls-remote` of its address)."
        )
    return source.revision


def _download(name: str, repo: str, path: str, revision: str, directory: Path) -> None:
    what = f"source '{name}': {repo} at {revision[:12]}"
    try:
        huggingface_hub.hf_hub_download(repo, path, revision=revision, local_dir=directory)
    except LocalEntryNotFoundError:
        raise SourceError(f"{what}: the hub cannot be reached (no network, or HF_HUB_OFFLINE is set)") from None
    except RevisionNotFoundError:
        raise SourceError(f"{what}: no such commit; correct `revision`") from None
    except RepositoryNotFoundError:
        raise SourceError(f"{what}: no such repository, or it needs a login (HF_TOKEN)") from None
    except EntryNotFoundError:
        raise SourceError(f"{what}: no file '{path}'; correct `files`") from None
    except (HfHubHTTPError, httpx.HTTPError) as error:
        raise SourceError(f"{what}: {path} cannot be downloaded: {str(error).splitlines()[0]}") from None
