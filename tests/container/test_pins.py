"""What runs is what is pinned, or nothing runs."""

from dataclasses import replace

import pytest
from built_image import SERVED, build
from docker import APIClient
from docker.models.containers import ContainerCollection
from serving import failure_of, run

from assay.engines.images import check_digest
from assay.engines.server import StartFailure
from assay.records import FailureKind

DIGEST = "sha256:df6bdd858b04a93f21e629dd90aaa9dd79a32c431b15ce63e268dc1e665c0b1d"


@pytest.fixture
def moved(registry, image):
    """Another image, which tag 1 means from now on."""
    other = build(SERVED | {"app/other.py": "OTHER = True\n"}, {})
    registry.push(other, "1")
    yield other
    registry.push(image, "1")


def test_the_image_is_the_same_on_every_machine(image):
    assert image.digest == DIGEST


def test_a_pinned_image_is_pulled_once_and_needs_no_registry_afterwards(launch, registry, tmp_path):
    launch = replace(launch, digest=unseen(registry, "once").digest)
    [cleanup] = run(launch, tmp_path)
    assert cleanup.clean and any("/blobs/" in path for path in registry.sent)
    registry.down = True
    [cleanup] = run(launch, tmp_path)
    assert cleanup.clean


def unseen(registry, name):
    """An image that no engine has seen anything of."""
    fresh = build(SERVED | {"app/name": name}, {})
    registry.push(fresh, name)
    return fresh


@pytest.mark.parametrize("part", ["layer", "config", "manifest"])
def test_an_altered_image_is_refused_and_nothing_of_it_is_kept(launch, client, registry, tmp_path, part):
    fresh = unseen(registry, f"altered-{part}")
    launch = replace(launch, digest=fresh.digest)
    registry.alter(getattr(fresh, part))
    failure, [cleanup] = failure_of(launch, tmp_path)
    assert failure.kind == FailureKind.IMAGE_MISMATCH
    assert f"image {registry.repository}@{fresh.digest} was refused by the engine" in str(failure)
    assert "verification failed" in str(failure) and "altered" in str(failure)
    assert cleanup.clean and fresh.id not in [held.id for held in client.images.list()]
    registry.reset()
    [cleanup] = run(launch, tmp_path)
    assert cleanup.clean


def test_a_stale_image_is_not_served_for_a_tag_whose_new_one_is_altered(launch, registry, image, moved, tmp_path):
    registry.push(image, "1")
    by_tag = replace(launch, digest=None, tag="1")
    run(by_tag, tmp_path)
    registry.push(moved, "1")
    registry.alter(moved.layer)
    failure, [cleanup] = failure_of(by_tag, tmp_path)
    assert failure.kind == FailureKind.IMAGE_MISMATCH and cleanup.clean
    assert f"{registry.repository}:1 was refused" in str(failure)
    assert f"the image that is held under this name ({image.id}) is not used" in str(failure)


def test_a_pull_that_breaks_off_without_an_error_does_not_serve_the_stale_image(launch, tmp_path, monkeypatch):
    by_tag = replace(launch, digest=None, tag="1")
    run(by_tag, tmp_path)
    real = APIClient.pull
    monkeypatch.setattr(APIClient, "pull", lambda *args, **options: list(real(*args, **options))[:1])
    failure, [cleanup] = failure_of(by_tag, tmp_path)
    assert failure.kind == FailureKind.IMAGE_MISSING and cleanup.clean
    assert "the engine broke off before it said what it had pulled" in str(failure)


def test_a_tag_is_what_the_registry_says_it_is_today(launch, registry, image, moved, tmp_path):
    registry.push(image, "1")
    by_tag = replace(launch, digest=None, tag="1")
    served = []
    for today in (image, moved):
        registry.push(today, "1")
        run(by_tag, tmp_path, lambda server: served.append(server.image()))
    assert [item.id for item in served] == [image.id, moved.id]
    assert [item.repo_digests for item in served] == [
        [f"{registry.repository}@{today.digest}"] for today in (image, moved)
    ]


def test_a_digest_that_no_registry_has_is_told_with_the_command_that_finds_one(launch, registry, tmp_path):
    failure, [cleanup] = failure_of(replace(launch, digest="sha256:" + "0" * 64), tmp_path)
    assert failure.kind == FailureKind.IMAGE_MISSING and cleanup.clean
    assert f"{registry.repository}@sha256:000" in str(failure)
    assert f"imagetools inspect {registry.repository}:TAG" in str(failure)


def test_a_registry_that_is_down_is_told(launch, registry, tmp_path):
    fresh = unseen(registry, "down")
    registry.down = True
    failure, [cleanup] = failure_of(replace(launch, digest=fresh.digest), tmp_path)
    assert failure.kind == FailureKind.IMAGE_MISSING and cleanup.clean
    assert f"@{fresh.digest} cannot be pulled" in str(failure) and "503" in str(failure)


def test_an_image_without_the_digest_it_was_asked_by_is_refused(launch, client, image, tmp_path):
    run(launch, tmp_path)
    held = client.images.get(launch.reference)
    check_digest(held, launch.reference, image.digest)
    expected = "sha256:" + "1" * 64
    with pytest.raises(StartFailure) as caught:
        check_digest(held, "served", expected)
    assert caught.value.kind == FailureKind.IMAGE_MISMATCH
    assert f"expected {expected}, found {launch.reference}" in str(caught.value)


def test_a_container_that_runs_another_image_is_refused_and_removed(launch, image, moved, tmp_path, monkeypatch):
    run(replace(launch, digest=moved.digest), tmp_path)
    real = ContainerCollection.create
    monkeypatch.setattr(ContainerCollection, "create", lambda self, _, **options: real(self, moved.id, **options))
    failure, [cleanup] = failure_of(launch, tmp_path)
    assert failure.kind == FailureKind.IMAGE_MISMATCH and cleanup.clean
    assert f"runs image {moved.id}, expected {image.id}" in str(failure)
