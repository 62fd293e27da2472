rule verdict:
    input:
        unpack(verdict_inputs),
    output:
        verdict="results/verdicts/{config}.json",
    log:
        "logs/verdict/{config}.log",
    benchmark:
        "benchmarks/verdict/{config}.tsv"
    resources:
        **SLURM,
        mem_mb=2000,
        runtime=30,
    params:
        options=gate_options,
        code=picked_code("verdict"),
    script:
        "../scripts/verdict.py"


rule junit:
    input:
        verdicts=all_verdicts,
    output:
        junit="results/junit.xml",
    log:
        "logs/junit.log",
    benchmark:
        "benchmarks/junit.tsv"
    resources:
        mem_mb=200,
        runtime=1,
    params:
        code=code("junit"),
    script:
        "../scripts/junit.py"


# A verdict is data, FAIL included; this is where it becomes an exit status.
rule gate:
    input:
        junit="results/junit.xml",
        verdicts=all_verdicts,
    log:
        "logs/gate.log",
    resources:
        mem_mb=200,
        runtime=1,
    params:
        accepted_caveats=CONFIG.settings.accepted_caveats,
        known_wrong=known_wrong(),
        code=code("gate"),
    script:
        "../scripts/gate.py"
