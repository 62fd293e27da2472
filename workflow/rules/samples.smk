rule samples:
    input:
        lock="samplesets/{set}.lock.json",
        sources=recipe_sources,
    output:
        sets="samplesets/{set}.parquet",
    log:
        "logs/samples/{set}.log",
    benchmark:
        "benchmarks/samples/{set}.tsv"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        recipe=recipe,
        code=code("samples"),
    script:
        "../scripts/samples.py"
