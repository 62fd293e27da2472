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


def test_a_config_may_be_about_the_deployment_of_another_name(tree):
    configs, folder = tree
    configs = {"a": configs["qwen3_5_9b"].model_copy(update={"deployment": "x"})}
    for path in folder.iterdir():
        path.unlink()
    (folder / "x.yaml").touch()
    assert compare_tree(configs, folder) == []
    (folder / "x.yaml").rename(folder / "y.yaml")
    assert [gap.split(";")[0] for gap in compare_tree(configs, folder)] == [
        f"y: {folder}/y.yaml is not in the map",
        f"a: in the map, but {folder} holds no deployment 'x'",
    ]


def test_an_empty_or_missing_directory_is_an_error_not_a_pass(tree, tmp_path):
    configs, _ = tree
    with pytest.raises(ConfigError, match="is not a directory"):
        compare_tree(configs, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no deployment file"):
        compare_tree(configs, tmp_path / "empty")
