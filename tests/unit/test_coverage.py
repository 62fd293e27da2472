"""The map of deployments against a directory of deployment files."""

from pathlib import Path

import pytest

from assay import config
from assay.coverage import compare_tree
from assay.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path):
    configs = config.load({"site": "embedded"}, ROOT / "config").configs
    for name, entry in configs.items():
        if entry.deployment is True:
            (tmp_path / f"{name}.yaml").write_text("{}")
    return configs, tmp_path


def test_a_tree_with_exactly_the_mapped_files_is_covered(tree):
    assert compare_tree(*tree) == []


def test_an_unmapped_file_and_a_name_without_file_are_named(tree):
    configs, folder = tree
    (folder / "nine_new_asr.yaml").write_text("{}")
    (folder / "qwen3_omni.yaml").unlink()
    first, second = compare_tree(configs, folder)
    assert first.startswith("nine_new_asr: ")
    assert second.startswith("qwen3_omni: ")


def test_a_config_may_be_about_a_deployment_of_another_name_that_need_not_be_there(tree):
    configs, folder = tree
    assert configs["qwen3_5_9b_mstar"].deployment == "qwen3_5_9b"
    (folder / "qwen3_5_9b.yaml").touch()
    assert compare_tree(configs, folder) == []
    (folder / "qwen3_5_9b.yaml").rename(folder / "qwen3_5_8b.yaml")
    assert [gap.split(":")[0] for gap in compare_tree(configs, folder)] == ["qwen3_5_8b"]


def test_an_empty_or_missing_directory_is_an_error_not_a_pass(tree, tmp_path):
    configs, _ = tree
    with pytest.raises(ConfigError, match="is not a directory"):
        compare_tree(configs, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no deployment file"):
        compare_tree(configs, tmp_path / "empty")
