rule judge:
    input:
        model=judge_manifest,
        speaker_encoder=speaker_manifest(served_judge_options),
        sets=sets_of,
        responses=instance_files("results/outputs", ".parquet"),
    output:
        tokens="results/judged/{config}.parquet",
    log:
        "logs/judge/{config}.log",
        devices="logs/judge/{config}.devices.jsonl",
    benchmark:
        "benchmarks/judge/{config}.tsv"
    threads: CONFIG.site.threads
    resources:
        **SLURM,
        mem_mb=judge_mb,
        runtime=judge_minutes,
        models=1,
        gres=judge_gres,
        nodes=1,
    params:
        judge=served_judge_options,
        devices=CONFIG.site.borrowed,
        versions=VERSIONS,
        code=picked_code("judge"),
    script:
        "../scripts/judge.py"


rule judge_reference:
    input:
        model=judge_manifest_of_model,
        speaker_encoder=speaker_manifest(judge_options),
        sets="samplesets/{set}.parquet",
        responses=floor_responses,
    output:
        tokens="results/judged/reference/{model}/{set}/{floor}.parquet",
    log:
        "logs/judge_reference/{model}/{set}/{floor}.log",
        devices="logs/judge_reference/{model}/{set}/{floor}.devices.jsonl",
    benchmark:
        "benchmarks/judge_reference/{model}/{set}/{floor}.tsv"
    threads: CONFIG.site.threads
    resources:
        **SLURM,
        mem_mb=judge_mb,
        runtime=judge_minutes,
        models=1,
        gres=judge_gres,
        nodes=1,
    params:
        judge=judge_options,
        devices=CONFIG.site.borrowed,
        versions=VERSIONS,
        code=picked_code("judge"),
    script:
        "../scripts/judge.py"
