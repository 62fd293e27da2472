"""A private container engine, a registry and an image. Without an engine: a skip, or a failure where CI wants one."""

import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from built_image import SERVED, build, python_mounts
from loopback_registry import LoopbackRegistry
from private_engine import PrivateEngine, find_dockerd, give_up
from processes import FAKE

from assay.engines.container import ContainerLaunch, Mount

ENGINE = Path(__file__).parents[2] / "resources/container-engine"


@pytest.fixture(scope="session")
def dockerd_path():
    """Folders to put on PATH for the engine."""
    path, missing = find_dockerd(ENGINE)
    if missing:
        give_up(missing)
    return path


@pytest.fixture(scope="session")
def engine(dockerd_path):
    """The engine that launches of these tests use: started before the first test that needs one."""
    with PrivateEngine(dockerd_path) as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", running.url)
        yield running


@pytest.fixture
def client(engine):
    """A client of the engine; after the test there is no container left, whatever the test was about."""
    with contextlib.closing(engine.client()) as client:
        yield client
        left = client.containers.list(all=True)
        for container in left:
            container.remove(force=True)
        assert [(container.short_id, container.status) for container in left] == []


@pytest.fixture(scope="session")
def image():
    return build(SERVED, {"PYTHONPATH": "/app", "PYTHONDONTWRITEBYTECODE": "1", "ONLY_IN_IMAGE": "1"})


@pytest.fixture(scope="session")
def shared_registry(image):
    with LoopbackRegistry() as registry:
        registry.push(image, "1")
        yield registry


@pytest.fixture
def registry(shared_registry):
    shared_registry.reset()
    return shared_registry


@pytest.fixture
def launch(client, registry, image):
    """A launch of the fake server, which works; tests change one thing about it."""
    return ContainerLaunch(
        runtime="docker",
        config="text",
        repository=registry.repository,
        digest=image.digest,
        argv=(sys.executable, str(FAKE), "--host={host}", "--port={port}"),
        env={"FROM_PLAN": "yes"},
        mounts=(*python_mounts(), Mount(str(FAKE.parent), str(FAKE.parent))),
        start_limit_s=30,
        stop_grace_s=5,
    )


@pytest.fixture
def with_flags(launch):
    """The launch, with flags of the fake server and other changes."""

    def change(*flags, **changes):
        return replace(launch, argv=(*launch.argv, *map(str, flags)), **changes)

    return change
