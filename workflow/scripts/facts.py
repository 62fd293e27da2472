"""Read what one instance's log says it runs."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.facts import facts

    facts(Path(snakemake.input.server_log), snakemake.params.rules, Path(snakemake.output.facts))
