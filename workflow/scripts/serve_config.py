"""Complete and write one config's serve plan."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.serve_config import serve_config

    manifest = snakemake.input.get("manifest")
    sets = snakemake.input.sets  # none, one file, or a list of them
    serve_config(
        snakemake.params.plan,
        Path(manifest) if manifest else None,
        [Path(file) for file in ([sets] if isinstance(sets, str) else sets)],
        Path(snakemake.output.plan),
    )
