"""Exit 1 unless every verdict passes."""

from assay.stage import stage

with stage(snakemake.log[0]):
    from assay.errors import AssayError
    from assay.gate import check

    allowed = snakemake.params.accepted_caveats
    accepted = None if allowed is None else set(allowed)
    if lines := check(snakemake.input.verdicts, accepted, snakemake.params.known_wrong):
        raise AssayError("not every verdict passes:\n  " + "\n  ".join(lines))
