"""Write the fault matrix of one config."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.config import Fault, parse
    from assay.matrix import matrix, render
    from assay.store import write_text

    faults = {name: parse(Fault, value, f"fault '{name}'") for name, value in snakemake.params.faults.items()}
    rows = matrix([Path(file) for file in snakemake.input.verdicts], faults)
    write_text(snakemake.output.page, render(rows, f"Fault matrix: {snakemake.wildcards.config}"))
