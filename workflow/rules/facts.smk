rule facts:
    input:
        server_log="results/outputs/{config}/{instance}.server.log",
    output:
        facts="results/facts/{config}/{instance}.json",
    log:
        "logs/facts/{config}/{instance}.log",
    benchmark:
        "benchmarks/facts/{config}/{instance}.tsv"
    resources:
        mem_mb=500,
        runtime=5,
    params:
        rules=log_rules,
        code=code("facts"),
    script:
        "../scripts/facts.py"
