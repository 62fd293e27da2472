rule reference:
    input:
        model=reference_manifest,
        environment=reference_environment,
        sets="samplesets/{set}.parquet",
    output:
        responses="results/reference/{model}/{set}/{arm}.parquet",
    log:
        "logs/reference/{model}/{set}/{arm}.log",
        devices="logs/reference/{model}/{set}/{arm}.devices.jsonl",
    benchmark:
        "benchmarks/reference/{model}/{set}/{arm}.tsv"
    threads: CONFIG.site.threads
    resources:
        **SLURM,
        mem_mb=judge_mb,
        runtime=judge_minutes,
        models=1,
        gres=judge_gres,
        nodes=1,
    params:
        reference=reference_options,
        devices=CONFIG.site.borrowed,
        versions=VERSIONS,
        code=picked_code("reference"),
    script:
        "../scripts/reference.py"
