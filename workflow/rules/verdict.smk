rule verdict:
    input:
        unpack(verdict_inputs),
    output:
        verdict=report("results/verdicts/{config}.json", category="Verdicts"),
    log:
        "logs/verdict/{config}.log",
    benchmark:
        "benchmarks/verdict/{config}.tsv"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        options=gate_options,
        code=code("verdict"),
    script:
        "../scripts/verdict.py"


rule gate:
    input:
        verdicts=all_verdicts(),
    output:
        junit="results/junit.xml",
    log:
        "logs/gate.log",
    benchmark:
        "benchmarks/gate.tsv"
    resources:
        mem_mb=200,
        runtime=1,
    params:
        code=code("gate"),
    script:
        "../scripts/gate.py"
