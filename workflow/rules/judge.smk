rule judge:
    input:
        model=judge_manifest,
        sets=sets_of,
        responses="results/outputs/{config}/{instance}.parquet",
    output:
        tokens="results/judged/{config}/{instance}.parquet",
    log:
        "logs/judge/{config}/{instance}.log",
        devices="logs/judge/{config}/{instance}.devices.jsonl",
    benchmark:
        "benchmarks/judge/{config}/{instance}.tsv"
    threads: CONFIG.site.threads
    resources:
        **SLURM,
        mem_mb=judge_mb,
        runtime=judge_minutes,
        models=1,
        gres=judge_gres,
        nodes=1,
    params:
        dtype=served_judge_dtype,
        devices=CONFIG.site.borrowed,
        versions=VERSIONS,
        code=picked_code("judge"),
    script:
        "../scripts/judge.py"


rule judge_reference:
    input:
        model=judge_manifest_of_model,
        sets="samplesets/{set}.parquet",
        responses="results/reference/{model}/{set}/{arm}.parquet",
    output:
        tokens="results/judged/reference/{model}/{set}/{arm}.parquet",
    log:
        "logs/judge_reference/{model}/{set}/{arm}.log",
        devices="logs/judge_reference/{model}/{set}/{arm}.devices.jsonl",
    benchmark:
        "benchmarks/judge_reference/{model}/{set}/{arm}.tsv"
    threads: CONFIG.site.threads
    resources:
        **SLURM,
        mem_mb=judge_mb,
        runtime=judge_minutes,
        models=1,
        gres=judge_gres,
        nodes=1,
    params:
        dtype=judge_dtype,
        devices=CONFIG.site.borrowed,
        versions=VERSIONS,
        code=picked_code("judge"),
    script:
        "../scripts/judge.py"
