"""Write every verdict as a JUnit test case."""

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.gate import write_junit

    write_junit(snakemake.input.verdicts, snakemake.output.junit)
