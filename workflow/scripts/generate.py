"""Serve one instance of a config, send it the sample sets, stop it."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.generate import Outputs, generate

    outputs = Outputs(**{name: Path(file) for name, file in snakemake.output.items()})
    sets = [Path(file) for file in snakemake.input.sets]
    generate(Path(snakemake.input.plan), sets, int(snakemake.wildcards.instance), outputs)
