"""Run one reference arm over one sample set."""

from pathlib import Path

from assay.stage import stage


def work() -> None:
    from assay.reference import reference

    reference(
        Path(snakemake.input.model).parent,
        Path(snakemake.input.sets),
        snakemake.wildcards.arm,
        snakemake.params.reference,
        Path(snakemake.output.responses),
        snakemake.params.devices["gpus"],
    )


with stage(snakemake.log[0], snakemake.threads):
    from assay.borrow import on_devices

    on_devices(snakemake.params.devices, Path(snakemake.log.devices), Path(snakemake.output.responses), work)
