"""Ask the `amdsmi` library for all it knows, as JSON on standard output. Run as a script by `assay.devices.smi`.

A process of its own, because importing amdsmi without ROCm prints to standard output and raises KeyError, and because
the library belongs to ROCm's interpreter and not to ours. Uses nothing but the standard library and amdsmi.
https://rocm.docs.amd.com/projects/amdsmi/en/latest/reference/amdsmi-py-api.html
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable
from typing import Any

MIB = 2**20


def main() -> None:
    """Print one list, an entry a device, in the shape of the rows of `assay.devices.smi`."""
    output = os.dup(1)
    os.dup2(2, 1)  # what the library prints, from C too, goes to standard error
    amdsmi = importlib.import_module("amdsmi")
    amdsmi.amdsmi_init()
    rows = [_row(amdsmi, index, handle) for index, handle in enumerate(amdsmi.amdsmi_get_processor_handles())]
    os.write(output, json.dumps(rows, default=str).encode())


def _row(amdsmi: Any, index: int, handle: Any) -> dict[str, Any]:
    def ask(name: str) -> Any:
        # Some calls are refused to other users, or are not there in other releases: that value is unknown.
        with contextlib.suppress(Exception):
            return getattr(amdsmi, f"amdsmi_get_{name}")(handle)
        return None

    def item(answer: Any, *keys: str) -> Any:
        found = (answer.get(key) for key in keys) if isinstance(answer, dict) else ()
        return next((value for value in found if value not in (None, "N/A")), None)

    def scaled(value: Any, by: int) -> Any:
        return value * by if isinstance(value, int) else None

    def pending(pages: Any) -> int | None:
        if isinstance(pages, str):  # a sentence: there is none
            return 0
        status = amdsmi.AmdSmiMemoryPageStatus.PENDING
        return sum(page["status"] == status for page in pages) if isinstance(pages, list) else None

    kfd, memory, errors = ask("gpu_kfd_info"), ask("gpu_vram_usage"), ask("gpu_total_ecc_count")
    compute, ranges = ask("gpu_compute_partition"), ask("gpu_memory_partition")
    return {
        "address": amdsmi.amdsmi_get_gpu_device_bdf(handle),
        "index": index,
        "node": item(kfd, "node_id"),
        "gpu_id": item(kfd, "kfd_id"),
        "partition": item(kfd, "current_partition_id"),
        "readings": {
            "name": item(ask("gpu_asic_info"), "market_name"),
            "partition_mode": f"{compute}/{ranges}" if compute and ranges else None,
            "memory_total": scaled(item(memory, "vram_total"), MIB),
            "memory_used": scaled(item(memory, "vram_used"), MIB),
            "activity": item(ask("gpu_activity"), "gfx_activity"),
            "power": item(ask("power_info"), "socket_power", "current_socket_power", "average_socket_power"),
            "performance_level": ask("gpu_perf_level"),
            "ecc_uncorrectable": item(errors, "uncorrectable_count"),
            "ecc_deferred": item(errors, "deferred_count"),
            "ecc_correctable": item(errors, "correctable_count"),
            "bad_pages_pending": pending(ask("gpu_bad_page_info")),
        },
        "processes": _processes(ask("gpu_process_list"), item),
    }


def _processes(answer: Any, item: Callable[..., Any]) -> list[dict[str, Any]] | None:
    """Pid, name and bytes of each process; None when the list cannot be had."""
    if not isinstance(answer, list) or not all(isinstance(entry, dict) for entry in answer):
        return None
    return [
        {"pid": entry["pid"], "name": item(entry, "name"), "memory": item(entry.get("memory_usage"), "vram_mem")}
        for entry in answer
    ]


if __name__ == "__main__":
    main()
