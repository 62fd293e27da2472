"""A private SLURM and a small sweep to run on it. Without SLURM: a skip, or a failure where CI wants one."""

import pytest
import tiny_sweep
from private_slurm import PrivateSlurm, give_up, why_not
from workspaces import ROOT

SLURM = ROOT / "resources/slurm"


@pytest.fixture(scope="session")
def cluster():
    if missing := why_not(SLURM):
        give_up(missing)
    with PrivateSlurm(SLURM) as running:
        yield running


@pytest.fixture(scope="session")
def local(tmp_path_factory, fetched, cluster):
    """The sweep as it runs on this machine, without SLURM: the workspace, and what Snakemake said."""
    workspace = tiny_sweep.make(tmp_path_factory.mktemp("local"), fetched(*tiny_sweep.SOURCES))
    return workspace, workspace.snakemake(*tiny_sweep.OPTIONS, *tiny_sweep.VERDICTS)
