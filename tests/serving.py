"""How tests of launchers serve: to the end, or to the failure that is looked at."""

import pytest
from processes import probe

from assay.engines.server import StartFailure, serve


def run(launch, tmp_path, body=lambda server: None, **options):
    """Serve, run `body`, return what `on_stop` was told, each time."""
    stops = []
    with serve(launch, tmp_path / "server.log", probe, stops.append, **options) as server:
        body(server)
    return stops


def failure_of(launch, tmp_path, **options):
    """The failure to start, and what `on_stop` was told, each time."""
    stops = []
    with (
        pytest.raises(StartFailure) as caught,
        serve(launch, tmp_path / "server.log", probe, stops.append, **options),
    ):
        pytest.fail("the server counted as ready")
    return caught.value, stops
