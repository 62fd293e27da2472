rule fetch:
    input:
        lambda wildcards: origins(wildcards),
    output:
        manifest="resources/{source}/manifest.json",
    log:
        "logs/fetch/{source}.log",
    benchmark:
        "benchmarks/fetch/{source}.tsv"
    resources:
        mem_mb=2000,
        runtime=60,
    params:
        pin=source_pin,
        code=code("fetch"),
    script:
        "../scripts/fetch.py"
