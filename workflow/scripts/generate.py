"""Serve one instance of a config, send it the sample sets, stop it."""

from snakemake.script import snakemake

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.generate import generate

    from assay import store

    generate(
        store.read_json(snakemake.input.plan),
        snakemake.input["items"],
        int(snakemake.wildcards.instance),
        snakemake.output,
    )
