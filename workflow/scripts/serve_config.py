"""Complete and write one config's serve plan."""

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.engines.plan import complete_plan
    from assay.store import read_json, write_json

    manifest = snakemake.input.get("manifest")
    write_json(snakemake.output.plan, complete_plan(snakemake.params.plan, read_json(manifest) if manifest else None))
