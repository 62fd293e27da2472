"""One workspace for all end-to-end tests: what one of them made, the next need not make again."""

import pytest
from workspaces import copy_workflow


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    return copy_workflow(tmp_path_factory.mktemp("workspace"))
