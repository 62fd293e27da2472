import json
import platform
import subprocess
from dataclasses import replace

import pytest

from assay.canonical import sha256_json
from assay.provenance import git_state, provenance, versions


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    """A folder `package` with a module, committed, beside other things."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/module.py").write_text("a = 1\n")
    (tmp_path / "notes.txt").write_text("")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_git_state_reads_the_commit_and_sees_a_change(checkout):
    module = checkout / "package/module.py"
    clean = git_state(module)
    assert len(clean.commit) == len(clean.tree) == 40 and clean.dirty is False
    module.write_text("a = 2\n")
    assert git_state(module) == replace(clean, dirty=True)
    git(checkout, "commit", "-am", "second")
    committed = git_state(module)
    assert committed.dirty is False and committed.commit != clean.commit and committed.tree != clean.tree


def test_what_changes_elsewhere_in_the_checkout_leaves_a_package_clean_and_its_tree_the_same(checkout):
    module = checkout / "package/module.py"
    clean = git_state(module)
    (checkout / "notes.txt").write_text("an edit")
    (checkout / "results.json").write_text("{}")
    assert git_state(module) == clean
    git(checkout, "add", ".")
    git(checkout, "commit", "-m", "notes")
    after = git_state(module)
    assert after.commit != clean.commit and (after.tree, after.dirty) == (clean.tree, False)


def test_git_state_of_an_untracked_file_inside_a_checkout_is_unknown(checkout):
    installed = checkout / ".venv" / "package.py"
    installed.parent.mkdir()
    installed.write_text("")
    state = git_state(installed)
    assert (state.commit, state.tree, state.dirty) == (None, None, None)


def test_the_version_of_what_is_not_installed_is_null():
    assert versions(["pytest", "no-such-distribution"]) == {"no-such-distribution": None, "pytest": pytest.__version__}


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
