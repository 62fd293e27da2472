rule score:
    input:
        model=judge_manifest,
        sets=sets_of,
        responses=instance_files("results/outputs", ".parquet"),
        tokens="results/judged/{config}.parquet",
        reference_responses=reference_responses,
        reference_tokens=reference_judged,
    output:
        scores="results/scores/{config}.parquet",
        floor="results/floors/{config}.parquet",
    log:
        "logs/score/{config}.log",
    benchmark:
        "benchmarks/score/{config}.tsv"
    resources:
        **SLURM,
        mem_mb=2000,
        runtime=30,
    params:
        options=gate_options,
        code=picked_code("score"),
    script:
        "../scripts/score.py"
