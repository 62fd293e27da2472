"""One file from a URL."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import httpx

from assay.config import UrlSource
from assay.errors import SourceError
from assay.sources.manifest import check_sha256

_BLOCK = 1 << 20


def fetch(name: str, source: UrlSource, directory: Path) -> None:
    """Put the file at `source.url` into `directory`, under the last part of the URL's path.

    Raises:
        SourceError: it cannot be read, was cut short, or has another hash.
    """
    filename = PurePosixPath(unquote(urlsplit(source.url).path)).name
    digest = hashlib.sha256()
    with _blocks(name, source.url) as blocks, (directory / filename).open("wb") as target:
        for block in blocks:
            digest.update(block)
            target.write(block)
    check_sha256(name, source.url, source.sha256, digest.hexdigest())


@contextmanager
def _blocks(name: str, url: str) -> Iterator[Iterable[bytes]]:
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        if not path.is_file():
            raise SourceError(f"source '{name}': {url}: no such file")
        with path.open("rb") as handle:
            yield iter(lambda: handle.read(_BLOCK), b"")
        return
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=60) as response:
            response.raise_for_status()
            yield response.iter_bytes(_BLOCK)
    except httpx.HTTPStatusError as error:
        raise SourceError(f"source '{name}': {url} answered HTTP {error.response.status_code}; correct `url`") from None
    except httpx.HTTPError as error:
        raise SourceError(f"source '{name}': {url} cannot be read: {error}. Nothing was kept; fetch again.") from None
