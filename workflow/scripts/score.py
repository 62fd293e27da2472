"""Score one config: every arm, the floor and the planted controls alike."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.score import score
    from assay.scoring.rows import Files

    def paths(name: str) -> list[Path]:
        return [Path(file) for file in snakemake.input[name]]

    score(
        paths("sets"),
        Files(paths("responses"), [Path(snakemake.input.tokens)]),
        Files(paths("reference_responses"), paths("reference_tokens")),
        Path(snakemake.input.model).parent,
        snakemake.params.options,
        Path(snakemake.output.scores),
        Path(snakemake.output.floor),
    )
