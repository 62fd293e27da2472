"""Build one pinned environment."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.environments import build_environment

    build_environment(snakemake.wildcards.environment, snakemake.input.lock, Path(snakemake.output.manifest).parent)
