"""Fetch one pinned source."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.config import Source, parse
    from assay.sources import fetch

    name = snakemake.wildcards.source
    origins = {Path(file).parent.name: Path(file).parent for file in snakemake.input}
    fetch(
        name, parse(Source, snakemake.params.pin, f"source '{name}'"), Path(snakemake.output.manifest).parent, origins
    )
