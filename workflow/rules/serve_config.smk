rule serve_config:
    input:
        manifest=served_manifest,
    output:
        plan="results/serve/{config}.json",
    log:
        "logs/serve_config/{config}.log",
    benchmark:
        "benchmarks/serve_config/{config}.tsv"
    resources:
        mem_mb=200,
        runtime=1,
    params:
        plan=plan,
        code=code("serve_config"),
    script:
        "../scripts/serve_config.py"
