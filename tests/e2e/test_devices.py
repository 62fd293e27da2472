"""A reference on a site with devices, as far as it goes without any: leased, and never computed on the CPU instead."""

import pytest
import yaml
from gpu import build, case

from assay.devices import discovery
from assay.devices.lease import lease

pytestmark = [pytest.mark.model, pytest.mark.timeout(2400)]

TARGET = "results/reference/smollm2_135m/needles_smoke/float32-matmul.parquet"  # which no config asks for at this tier
LOG = "logs/reference/smollm2_135m/needles_smoke/float32-matmul.log"


@pytest.fixture
def machine(workspace, tmp_path):
    """A site of the workspace with eight idle AMD devices, made of files."""
    made = build(case("01"), tmp_path, tools=False)
    (made.sysfs / "class/kfd/kfd/proc").mkdir(parents=True)
    site = workspace.path / "config/sites/made_of_files.yaml"
    devices = made.options.model_dump(mode="json") | {"settle_s": 0, "poll_s": 0.1}
    content = yaml.safe_load((workspace.path / "config/sites/embedded.yaml").read_text())
    site.write_text(yaml.safe_dump(content | {"device": "amd", "devices": devices, "reference_gpus": 3}))
    yield made
    site.unlink()


def test_a_reference_whose_torch_sees_no_leased_device_fails_and_writes_nothing(workspace, machine):
    done = workspace.snakemake("--config", "site=made_of_files", "--", TARGET, check=False)
    log = (workspace.path / LOG).read_text()
    assert done.returncode and not (workspace.path / TARGET).exists(), log
    assert "3 devices are leased for the reference" in log and "nothing falls back to the CPU" in log
    assert "Traceback" not in log
    assert (workspace.path / LOG).with_suffix(".devices.jsonl").stat().st_size
    node = discovery.discover("amd", machine.options)
    with lease(node.devices, 8, machine.options.lock_dir, 0, "y"):  # all of them were given back
        pass
