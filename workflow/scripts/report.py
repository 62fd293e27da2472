"""Write the page on one verdict."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.report.page import write_report

    write_report(Path(snakemake.input.verdict), Path(snakemake.output.report))
