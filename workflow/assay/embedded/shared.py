"""What every server over torch can plant alike: a failed request, and the changes that no verdict may fail."""

from __future__ import annotations

from typing import Any

import torch

from assay.embedded.api import ApiError
from assay.embedded.switch import Switch


def register(switch: Switch, planted: Any) -> None:
    """Add them to a server's switch.

    Args:
        switch: its faults.
        planted: base of its faults: hooks that are made with a fault's value.
    """

    @switch.fault("http_500", int, "the VALUE-th request (from 0) is answered with HTTP 500")
    class Http500(planted):
        def request(self, request: Any) -> Any:
            if request.number == self.value:
                raise ApiError(500, "planted fault http_500")
            return request

    @switch.fault("rerun", None, "benign: nothing is changed")
    class Rerun(planted):
        """A clean server under a name of its own."""

    @switch.fault("threads", int, "benign: VALUE threads")
    class Threads(planted):
        def ready(self) -> None:
            torch.set_num_threads(self.value)

    @switch.fault("max_rows", int, "benign: batches of up to VALUE rows")
    class MaxRows(planted):
        def __init__(self, value: int) -> None:
            super().__init__(value)
            self.max_rows = value

    @switch.fault("no_onednn", None, "benign: matrix products without oneDNN")
    class NoOneDnn(planted):
        def model(self, model: Any) -> None:
            torch.backends.mkldnn.enabled = False
