"""What belongs to one instance alone, and what it finds from earlier ones."""

import tempfile
from pathlib import Path

import huggingface_hub
import pytest

from assay.engines.instance import cache_states, instance_folder, lay_out_hub, write_files
from assay.engines.plan import fill_instance
from assay.errors import StoreError

REVISION = "0123456789abcdef0123456789abcdef01234567"
PLAIN = {"model": {"hub": None}}


def test_two_instances_share_no_folder_and_leave_none():
    with instance_folder(PLAIN) as first, instance_folder(PLAIN) as second:
        assert first != second and first.is_dir() and second.is_dir()
    assert not first.exists() and not second.exists()


def test_two_instances_share_no_path_and_no_port():
    plan = {
        "argv": ["--port={port}", "--sockets={instance_dir}/s", "--mesh={side_port_mesh}", '--x={"a": 1}'],
        "env": {"TMPDIR": "{instance_dir}"},
        "files": {"engine.yaml": "{listen: {side_port_mesh}, tmp: {instance_dir}}"},
    }
    argv, env, files = fill_instance(plan, "one", {"mesh": 9001})
    assert argv == ["--port={port}", "--sockets=one/s", "--mesh=9001", '--x={"a": 1}'] and env == {"TMPDIR": "one"}
    assert files == {"engine.yaml": "{listen: 9001, tmp: one}"}
    others, other_env, other_files = fill_instance(plan, "two", {"mesh": 9002})
    assert set(argv) & set(others) == {"--port={port}", '--x={"a": 1}'} and env != other_env and files != other_files


def test_files_of_an_instance_lie_in_its_folder_and_go_with_it():
    with instance_folder(PLAIN) as folder:
        write_files(folder, {"engine.yaml": "device: cpu\n"})
        assert (folder / "engine.yaml").read_text() == "device: cpu\n"
    with pytest.raises(StoreError, match=r"cannot write .*engine\.yaml: No such file"):
        write_files(folder, {"engine.yaml": ""})


def test_weights_are_found_by_name_where_an_engine_takes_no_path(tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    hub = {"repo": "Qwen/Qwen3.5-9B", "revision": REVISION}
    with instance_folder({"model": {"hub": hub, "directory": str(weights)}}) as folder:
        # The hub's own client, without a network.
        found = huggingface_hub.snapshot_download(hub["repo"], cache_dir=folder / "hub", local_files_only=True)
        assert Path(found).name == REVISION and Path(found, "config.json").samefile(weights / "config.json")
        file = huggingface_hub.hf_hub_download(
            hub["repo"], "config.json", cache_dir=folder / "hub", local_files_only=True
        )
        assert Path(file).samefile(weights / "config.json")
    assert (weights / "config.json").exists()  # the link is gone with the folder, and nothing behind it


def test_weights_of_another_name_are_not_found(tmp_path):
    lay_out_hub(tmp_path / "hub", tmp_path, "Qwen/Qwen3.5-9B", REVISION)
    with pytest.raises(huggingface_hub.errors.LocalEntryNotFoundError):
        huggingface_hub.snapshot_download("Qwen/Qwen3.5-4B", cache_dir=tmp_path / "hub", local_files_only=True)


def test_no_room_for_temporary_files_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no/such/folder")
    with pytest.raises(StoreError, match="cannot make a folder for the instance"), instance_folder(PLAIN):
        pytest.fail("it was made")


def test_an_error_of_what_runs_in_the_folder_is_not_taken_for_ours():
    with pytest.raises(OSError, match="of the server") as error, instance_folder(PLAIN):
        raise OSError("of the server")
    assert not isinstance(error.value, StoreError)


def test_a_cache_is_warm_when_it_holds_a_file_and_unknown_when_it_cannot_be_read(tmp_path):
    (tmp_path / "empty/deep").mkdir(parents=True)
    (tmp_path / "full/deep").mkdir(parents=True)
    (tmp_path / "full/deep/kernel.o").touch()
    (tmp_path / "file").touch()
    plan = {"caches": {name: str(tmp_path / name) for name in ("empty", "full", "absent", "file")}}
    assert cache_states(plan) == {"empty": "cold", "full": "warm", "absent": "cold", "file": None}
