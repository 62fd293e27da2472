"""Build one sample set, and check it against its lock."""

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.provenance import provenance
    from assay.samples.build import build_set

    origin = provenance("samples", snakemake.input, {"recipe": snakemake.params.recipe})
    build_set(snakemake.wildcards.set, snakemake.output.sets, provenance=origin)
