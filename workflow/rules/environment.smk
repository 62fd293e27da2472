rule environment:
    input:
        lock="config/environments/{environment}.txt",
    output:
        manifest="resources/environments/{environment}/manifest.json",
    log:
        "logs/environment/{environment}.log",
    benchmark:
        "benchmarks/environment/{environment}.tsv"
    resources:
        mem_mb=2000,
        runtime=60,
        installs=1,
    params:
        code=code("environment"),
    script:
        "../scripts/environment.py"
