"""Judge the responses of one config, or of one floor."""

from pathlib import Path

from assay.stage import stage


def work() -> None:
    from assay.judge import judge

    sets = snakemake.input.sets  # one file, or a list of them
    judge(
        Path(snakemake.input.model).parent,
        snakemake.params.judge,
        [Path(file) for file in ([sets] if isinstance(sets, str) else sets)],
        [Path(file) for file in snakemake.input.responses],
        Path(snakemake.output.tokens),
        snakemake.params.devices["gpus"],
    )


with stage(snakemake.log[0], snakemake.threads):
    from assay.borrow import on_devices

    on_devices(snakemake.params.devices, Path(snakemake.log.devices), Path(snakemake.output.tokens), work)
