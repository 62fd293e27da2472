import json
import platform
import subprocess

import pytest

from assay.canonical import sha256_json
from assay.provenance import git_state, provenance


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "module.py").write_text("a = 1\n")
    git("add", "module.py")
    git("commit", "-m", "first")
    return tmp_path


def test_git_state_reads_the_commit_and_sees_a_change(checkout):
    clean = git_state(checkout / "module.py")
    assert len(clean.commit) == 40 and clean.dirty is False
    (checkout / "module.py").write_text("a = 2\n")
    changed = git_state(checkout / "module.py")
    assert (changed.commit, changed.dirty) == (clean.commit, True)


def test_git_state_of_an_untracked_file_inside_a_checkout_is_unknown(checkout):
    installed = checkout / ".venv" / "package.py"
    installed.parent.mkdir()
    installed.write_text("")
    state = git_state(installed)
    assert (state.commit, state.dirty) == (None, None)


def test_provenance_hashes_inputs_and_options_and_names_no_host(tmp_path):
    source = tmp_path / "items.bin"
    source.write_bytes(b"abc")
    record = provenance("generate", [source], {"dtype": "float32"})
    # SHA-256 of "abc" is the first example of FIPS 180-2.
    assert record["inputs"] == {str(source): "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    assert record["options_sha256"] == sha256_json({"dtype": "float32"})
    assert record["started_utc"] <= record["finished_utc"]
    if len(platform.node()) > 3:
        assert platform.node() not in json.dumps(record)
