"""What a speech model's own package says to a sample set, as the judge or as one floor arm."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from assay import store
from assay.provenance import provenance
from assay.records import JUDGE, Evidence, ResponseStatus
from assay.references.external import run
from assay.samples.lock import load_set
from assay.sources.manifest import MANIFEST, verify_weights


def reference(
    model_dir: Path, items_path: Path, arm: str, options: Mapping[str, Any], output: Path, gpus: int = 0
) -> None:
    """Have every item of a sample set spoken by one reference arm and write a `responses` table.

    Args:
        model_dir: weights, checked against their source's manifest.
        items_path: `items` table of one sample set.
        arm: `judge` or `<dtype>-<change>`.
        options: an `ExternalReference`, with the family's `request`, the `python` of its environment and our `library`.
        output: Parquet file to write.
        gpus: devices that this process, and so the command, sees.

    Raises:
        ReferenceFailure: the command fails, or does not answer every item once; nothing is written.
    """
    weights_sha256 = verify_weights(model_dir)
    items = {row["item_id"]: row for row in load_set(items_path)}
    requests = [{"id": key, **options["request"], **json.loads(row["request"])} for key, row in items.items()]
    change = [] if arm == JUDGE else options["changes"][arm.partition("-")[2]]
    values = {
        "python": options["python"],
        "library": options["library"],
        "model_dir": str(model_dir),
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        "requests": "{requests}",
        "output": "{output}",
    }
    argv = [word.format(**values) for word in (*options["command"], *change)]
    env = {name: text.format(**values) for name, text in options["env"].items()}
    with TemporaryDirectory(prefix="assay-reference-") as folder:
        spoken = run(argv, env, requests, Path(folder))
        rows = [_row(key, file) | {"set_id": items[key]["set_id"], "arm": arm} for key, file in spoken.files.items()]
    record = provenance(
        "reference",
        [model_dir / MANIFEST, items_path],
        {
            "arm": arm,
            "settings": {"argv": argv, "env": env, "request": options["request"]},
            "weights_sha256": weights_sha256,
            "environment": options["environment"],
            "versions": spoken.versions,
        },
    )
    store.write_table(output, "responses", store.table_from_rows("responses", rows), record)


def _row(item_id: str, file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {
        "item_id": item_id,
        "status": ResponseStatus.OK,
        "evidence": Evidence.E3,
        "attempts": 1,
        "audio": {"bytes": content, "path": f"{item_id}{file.suffix}"},
        "output_sha256": hashlib.sha256(content).hexdigest(),
    }
