"""Score one config: every arm, the floor and the planted controls alike."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.score import score

    def paths(name: str) -> list[Path]:
        return [Path(file) for file in snakemake.input[name]]

    score(
        paths("sets"),
        list(zip(paths("responses"), paths("tokens"), strict=True)),
        list(zip(paths("reference_responses"), paths("reference_tokens"), strict=True)),
        Path(snakemake.input.model).parent,
        snakemake.params.options,
        Path(snakemake.output.scores),
        Path(snakemake.output.floor),
    )
