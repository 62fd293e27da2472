"""Complete and write one config's serve plan."""

from snakemake.script import snakemake

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.engines.plan import complete_plan

    from assay import store

    manifests = [store.read_json(file) for file in snakemake.input.get("manifests", [])]
    store.write_json(snakemake.output.plan, complete_plan(snakemake.params.plan, manifests))
