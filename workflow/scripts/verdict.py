"""Decide one config's verdict and write it, FAIL included."""

from pathlib import Path

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.store import read_json, write_json
    from assay.verdict import RunFiles, decide_run, refuse

    files = {
        name: Path(value) if isinstance(value, str) else [Path(file) for file in value]
        for name, value in snakemake.input.items()
    }
    if "plan" in files:
        verdict = refuse(read_json(files["plan"]))
    else:
        verdict = decide_run(RunFiles(**files), snakemake.params.options)
    write_json(snakemake.output.verdict, verdict.model_dump(mode="json"))
