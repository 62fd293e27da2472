rule generate:
    input:
        plan="results/serve/{config}.json",
        sets=sets_of,
        environment=served_environment,
    output:
        responses="results/outputs/{config}/{instance}.parquet",
        identity="results/outputs/{config}/{instance}.identity.json",
        cleanup="results/outputs/{config}/{instance}.cleanup.json",
        server_log="results/outputs/{config}/{instance}.server.log",
        devices="results/outputs/{config}/{instance}.devices.jsonl",
    log:
        "logs/generate/{config}/{instance}.log",
    benchmark:
        "benchmarks/generate/{config}/{instance}.tsv"
    # The longest job of a run: started first, it overlaps with the reference.
    priority: 10
    threads: CONFIG.site.threads
    resources:
        **SLURM,
        mem_mb=served_mb,
        runtime=served_minutes,
        models=1,
        gres=served_gres,
        nodes=1,
    params:
        code=code("generate"),
    script:
        "../scripts/generate.py"
