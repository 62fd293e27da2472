"""The container engine of this machine, and images of it that are what their pin says.

An image is pinned by the digest of its manifest (`repository@sha256:...`), the one name that is the same in a registry,
in every engine and in every image store. A pull's errors arrive inside its stream after HTTP 200: they are read here,
because a pull that failed by tag otherwise gives the older image that had the tag, without a word.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from http.client import HTTPException

import docker
from docker import DockerClient
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.images import Image
from urllib3.exceptions import HTTPError

from assay.config import digest_hint
from assay.engines.server import StartFailure
from assay.errors import ConfigError
from assay.records import FailureKind

log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 120
PULL_SILENCE_S = 600  # a registry or a disk may be still for long while a layer of many GB is unpacked
# An engine that is gone is not a DockerException, and one that goes while it talks is anything a connection can raise.
ENGINE_ERRORS = (DockerException, OSError, HTTPError, HTTPException)

_DIGEST = "Digest: "  # what the stream of a pull that came to its end says
_ALTERED = "verification failed"  # what engines say of a layer, a config or a manifest that is not its digest


def connect(limit_s: float = ANSWER_LIMIT_S) -> DockerClient:
    """The engine that `DOCKER_HOST` names, or the machine's own.

    Raises:
        StartFailure: no engine answers, or we may not talk to it.
    """
    with engine_told(FailureKind.ENGINE_UNREACHABLE, "the container engine refused us"):
        return docker.from_env(timeout=limit_s)


@contextlib.contextmanager
def engine_told(kind: FailureKind, what: str) -> Iterator[None]:
    """Turn what the engine says into a StartFailure: `kind` when it answered, else that it cannot be reached."""
    try:
        yield
    except APIError as error:
        raise StartFailure(kind, f"{what}: {told(error)}") from error
    except ENGINE_ERRORS as error:
        raise StartFailure(
            FailureKind.ENGINE_UNREACHABLE,
            f"the container engine cannot be reached: {told(error)}; is it running, may we use its socket, and is "
            "DOCKER_HOST right (unset: the machine's own)?",
        ) from error


def told(error: Exception) -> str:
    """What the engine said, in one line."""
    explanation = error.explanation if isinstance(error, APIError) else None
    return " ".join(str(explanation or error).split())


def reference(repository: str, digest: str | None, tag: str | None) -> str:
    """The name to pull and to look up.

    Raises:
        ConfigError: neither digest nor tag; the message says how the digest is found.
    """
    if digest is not None:
        return f"{repository}@{digest}"
    if tag is None:
        raise ConfigError(f"image {repository} has no digest: give it {digest_hint(f'{repository}:latest')}")
    return f"{repository}:{tag}"


def ensure_image(engine: DockerClient, repository: str, digest: str | None, tag: str | None) -> Image:
    """The image of a pin, pulled if it is not there. A tag is pulled always: it may mean another image today.

    Raises:
        StartFailure: it cannot be had, or what came is not what the pin says.
    """
    name = reference(repository, digest, tag)
    with engine_told(FailureKind.IMAGE_MISSING, f"image {name} cannot be looked up"):
        image = find(engine, name)
    if image is None or digest is None:
        pulled = _pull(repository, digest or tag, name, image)
        with engine_told(FailureKind.IMAGE_MISSING, f"image {name} was pulled and is not there"):
            image = engine.images.get(name)
        check_digest(image, name, pulled)
    if digest is not None:
        check_digest(image, name, digest)
    return image


def find(engine: DockerClient, name: str) -> Image | None:
    """The image of that name, if the engine has it."""
    try:
        return engine.images.get(name)
    except ImageNotFound:
        return None


def check_digest(image: Image, name: str, digest: str) -> None:
    """Raises StartFailure unless `digest` is one of the digests that the image was pulled by."""
    found = repo_digests(image)
    if digest not in {entry.rpartition("@")[2] for entry in found}:
        raise StartFailure(
            FailureKind.IMAGE_MISMATCH,
            f"image {name} is not what the engine has under that name: expected {digest}, found "
            f"{', '.join(found) or 'no digest'} (image {image.id}); remove it there and pull it again",
        )


def repo_digests(image: Image) -> list[str]:
    """`repository@digest` of every pull that gave this image."""
    return sorted(image.attrs.get("RepoDigests") or [])


def _pull(repository: str, version: str | None, name: str, before: Image | None) -> str:
    """Pull an image; the digest that the engine says it has now."""
    log.info("pulling %s", name)
    started = time.monotonic()
    kept = f"; the image that is held under this name ({before.id}) is not used" if before else ""
    failed = f"image {name} cannot be pulled{kept}"
    try:
        with (
            engine_told(FailureKind.IMAGE_MISSING, failed),
            contextlib.closing(connect(PULL_SILENCE_S)) as engine,
        ):
            steps = list(engine.api.pull(repository, tag=version, stream=True, decode=True))
    except StartFailure as failure:
        if isinstance(failure.__cause__, NotFound):
            raise StartFailure(
                failure.kind,
                f"{failure}; check repository and digest, which is {digest_hint(f'{repository}:TAG')}",
            ) from None
        raise
    errors = [step["error"] for step in steps if "error" in step]
    if any(_ALTERED in error for error in errors):
        raise StartFailure(
            FailureKind.IMAGE_MISMATCH,
            f"image {name} was refused by the engine: {'; '.join(errors)}{kept}; the registry, or something on the "
            "way, altered it, and nothing of it was kept",
        )
    digests = [step["status"].removeprefix(_DIGEST) for step in steps if step.get("status", "").startswith(_DIGEST)]
    if errors or not digests:
        why = "; ".join(errors) or "the engine broke off before it said what it had pulled"
        raise StartFailure(FailureKind.IMAGE_MISSING, f"{failed}: {why}")
    log.info("pulled %s in %.0f s", name, time.monotonic() - started)
    return digests[-1]
