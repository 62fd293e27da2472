"""Debian packages: apt's own download, a copy at hand, and each fault with its one message."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from debs import FILES, make_deb, write_apt_config, write_index

from assay.canonical import sha256_file
from assay.config import AptSource
from assay.errors import SourceError
from assay.sources import fetch, verify_manifest
from assay.sources.apt import decisive_line

ABSENT = "0" * 64
needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="there is no apt-get to test with")


def pin(sha256: str, **changes: object) -> AptSource:
    values = {"kind": "apt", "package": "tiny", "version": "1.0-1", "files": ["usr/share/tiny/*"], "licence": "CC0-1.0"}
    return AptSource(**{**values, "sha256": sha256, **changes})  # type: ignore[arg-type]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only repository that apt knows, with `tiny` 1.0-1 in it; apt has not read its index yet."""
    folder = tmp_path / "repository"
    make_deb(folder)
    write_index(folder)
    monkeypatch.setenv("APT_CONFIG", str(write_apt_config(tmp_path / "apt", folder)))
    return folder


@pytest.fixture
def no_apt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def refused(source: AptSource, tmp_path: Path) -> str:
    """The message of a fetch that must fail, after checking that it left nothing."""
    with pytest.raises(SourceError) as caught:
        fetch("it", source, tmp_path / "resources" / "it")
    assert [path.name for path in (tmp_path / "resources").iterdir() if path.name != "packages"] == []
    message = str(caught.value)
    assert "\n" not in message
    return message


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# --- from apt -----------------------------------------------------------------------------------------------------


@needs_apt
def test_a_package_is_unpacked_to_the_files_listed_with_a_manifest(repository: Path, tmp_path: Path) -> None:
    source = pin(sha256_file(repository / "tiny_1.0-1_all.deb"))
    manifest = fetch("it", source, tmp_path / "it")
    assert files_of(tmp_path / "it") == ["manifest.json", "usr/share/tiny/a.txt", "usr/share/tiny/b.bin"]
    assert (tmp_path / "it/usr/share/tiny/a.txt").read_bytes() == FILES["./usr/share/tiny/a.txt"]
    assert (manifest.kind, manifest.pin["version"], manifest.licence) == ("apt", "1.0-1", "CC0-1.0")
    assert verify_manifest(tmp_path / "it") == manifest


@needs_apt
def test_an_index_that_is_empty_or_old_is_left_alone_and_a_fresh_one_read(repository: Path, tmp_path: Path) -> None:
    newer = make_deb(repository, "1.1-1")
    subprocess.run(["apt-get", "-q=2", "update"], check=True)
    known = files_of(tmp_path / "apt" / "lists")
    latest = make_deb(repository, "2:1.2-1")  # an epoch, which apt escapes in the file's name
    write_index(repository)
    fetch("it", pin(sha256_file(latest), version="2:1.2-1"), tmp_path / "it")
    assert files_of(tmp_path / "apt" / "lists") == known
    fetch("it", pin(sha256_file(newer), version="1.1-1"), tmp_path / "it")


@needs_apt
def test_a_package_with_another_hash_is_refused(repository: Path, tmp_path: Path) -> None:
    found = sha256_file(repository / "tiny_1.0-1_all.deb")
    message = refused(pin(ABSENT), tmp_path)
    assert f"wrong sha256 of tiny=1.0-1: expected {ABSENT}, found {found}" in message


@needs_apt
@pytest.mark.parametrize(
    ("changes", "file", "why"),
    [
        ({"version": "9-1"}, "tiny_9-1_all.deb", "Version '9-1' for 'tiny' was not found"),
        ({"package": "tinny"}, "tinny_1.0-1_all.deb", "Unable to locate package tinny"),
    ],
)
def test_what_the_index_has_not_is_named_with_its_hash_and_where_a_copy_goes(
    changes: dict[str, str], file: str, why: str, repository: Path, tmp_path: Path
) -> None:
    message = refused(pin(ABSENT, **changes), tmp_path)
    assert f"{file} (sha256 {ABSENT}) cannot be downloaded: {why}" in message
    assert f"Put a copy of that file at {tmp_path / 'resources' / 'packages' / file}" in message


@needs_apt
def test_a_package_that_is_cut_short_on_the_way_is_refused(repository: Path, tmp_path: Path) -> None:
    package = repository / "tiny_1.0-1_all.deb"
    good = sha256_file(package)
    package.write_bytes(package.read_bytes()[:400])
    message = refused(pin(good), tmp_path)
    assert "cannot be downloaded: Failed to fetch (index)" in message
    assert "Hash Sum mismatch" in message


@needs_apt
def test_no_network_is_told_from_an_unknown_name(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "apt" / "sources.list").write_text("deb [trusted=yes] http://127.0.0.1:9/ ./\n")  # nobody listens
    message = refused(pin(ABSENT), tmp_path)
    assert "cannot be downloaded: the package index cannot be reached" in message
    assert "127.0.0.1" not in message


def test_no_apt_is_one_message_with_the_file_its_hash_and_where_a_copy_goes(no_apt: None, tmp_path: Path) -> None:
    message = refused(pin(ABSENT), tmp_path)
    assert f"tiny_1.0-1_all.deb (sha256 {ABSENT}) cannot be downloaded: there is no apt-get on this machine" in message
    assert f"Put a copy of that file at {tmp_path / 'resources' / 'packages' / 'tiny_1.0-1_all.deb'}" in message


# --- from a copy --------------------------------------------------------------------------------------------------


def test_a_copy_needs_no_apt(no_apt: None, tmp_path: Path) -> None:
    package = make_deb(tmp_path / "resources" / "packages")
    fetch("it", pin(sha256_file(package)), tmp_path / "resources" / "it")
    assert "usr/share/tiny/b.bin" in files_of(tmp_path / "resources" / "it")
    assert package.is_file()


def test_a_copy_that_is_another_file_or_truncated_is_refused_by_its_path(no_apt: None, tmp_path: Path) -> None:
    package = make_deb(tmp_path / "resources" / "packages")
    assert f"wrong sha256 of {package}: expected {ABSENT}" in refused(pin(ABSENT), tmp_path)
    good = sha256_file(package)
    package.write_bytes(package.read_bytes()[:-10])
    assert f"expected {good}, found {sha256_file(package)}" in refused(pin(good), tmp_path)


@pytest.mark.parametrize("bytes_kept", [0, 8, 90, 300, -10])
def test_a_truncated_package_whose_own_hash_was_pinned_is_named(no_apt: None, tmp_path: Path, bytes_kept: int) -> None:
    package = make_deb(tmp_path / "resources" / "packages")
    package.write_bytes(package.read_bytes()[:bytes_kept])
    assert "tiny_1.0-1_all.deb cannot be unpacked" in refused(pin(sha256_file(package)), tmp_path)


@pytest.mark.parametrize("place", [100, 200_000], ids=["at its start", "far into it"])
def test_a_wrong_byte_in_a_package_whose_own_hash_was_pinned_is_named(no_apt: None, tmp_path: Path, place: int) -> None:
    noise = {f"./usr/share/tiny/{name}.bin": random.Random(name).randbytes(100_000) for name in "abc"}
    package = make_deb(tmp_path / "resources" / "packages", files=noise)
    content = bytearray(package.read_bytes())
    content[content.index(b"data.tar.xz") + 60 + place] ^= 0xFF  # behind the archive's header of 60 bytes
    package.write_bytes(content)
    assert "tiny_1.0-1_all.deb cannot be unpacked" in refused(pin(sha256_file(package)), tmp_path)


def test_a_package_in_a_compression_that_python_lacks_is_named_with_it(no_apt: None, tmp_path: Path) -> None:
    package = make_deb(tmp_path / "resources" / "packages")
    content = package.read_bytes().replace(b"data.tar.xz ", b"data.tar.zst").replace(b"\xfd7zXZ", b"\x28\xb5\x2f\xfd\0")
    package.write_bytes(content)
    assert "tiny_1.0-1_all.deb cannot be unpacked (data.tar.zst: " in refused(pin(sha256_file(package)), tmp_path)


def test_a_file_that_the_package_lacks_is_named(no_apt: None, tmp_path: Path) -> None:
    package = make_deb(tmp_path / "resources" / "packages")
    message = refused(pin(sha256_file(package), files=["usr/share/tiny/*", "usr/share/*.wav"]), tmp_path)
    assert "no file in tiny_1.0-1_all.deb matches 'usr/share/*.wav'; correct `files`" in message


def test_a_file_that_would_land_outside_is_refused(no_apt: None, tmp_path: Path) -> None:
    package = make_deb(tmp_path / "resources" / "packages", files={"../../evil.txt": b"evil"})
    assert "cannot be unpacked" in refused(pin(sha256_file(package), files=["*"]), tmp_path)
    assert list(tmp_path.rglob("evil.txt")) == []


def test_the_line_quoted_from_apt_never_names_a_host() -> None:
    output = "W: old\nE: Failed to fetch http://index.example/pool/tiny.deb  404  Not Found\nE: Unable to fetch some\n"
    assert decisive_line(output) == "Failed to fetch (index)  404  Not Found"
    assert decisive_line("W: only a warning\n") == "apt-get gave no reason"
