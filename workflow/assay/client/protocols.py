"""The protocol of an arm's client, picked by its spec."""

from __future__ import annotations

from assay.client.mstar import MstarPlan
from assay.client.openai import OpenAIPlan
from assay.client.transport import Plan
from assay.config import ClientSpec, MstarSpec


def client_plan(spec: ClientSpec, base_url: str, stream: bool | None = None) -> Plan:
    """How to talk, in the protocol of an arm's client, to the server at `base_url`; `stream` None: as the arm says."""
    if isinstance(spec, MstarSpec):
        return MstarPlan.of(spec, base_url, spec.model)
    chosen = spec if stream is None else spec.model_copy(update={"stream": stream})
    return OpenAIPlan.of(chosen, base_url, spec.model)
