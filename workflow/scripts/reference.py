"""Run one reference arm over one sample set."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0], snakemake.threads):
    from assay.reference import reference

    reference(
        Path(snakemake.input.model).parent,
        Path(snakemake.input.sets),
        snakemake.wildcards.arm,
        snakemake.params.judge_dtype,
        Path(snakemake.output.responses),
    )
