"""Teacher-force the tokens of one responses table through the judge."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0], snakemake.threads):
    from assay.judge import judge

    sets = snakemake.input.sets  # one file, or a list of them
    judge(
        Path(snakemake.input.model).parent,
        snakemake.params.dtype,
        [Path(file) for file in ([sets] if isinstance(sets, str) else sets)],
        Path(snakemake.input.responses),
        Path(snakemake.output.tokens),
    )
