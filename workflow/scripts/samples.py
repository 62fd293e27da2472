"""Build one sample set, and check it against its lock."""

from snakemake.script import snakemake

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.samples import build_set

    build_set(snakemake.input.recipe, snakemake.input.lock, snakemake.output.items)
