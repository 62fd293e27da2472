rule samples:
    input:
        recipe="samplesets/{set}.yaml",
        lock="samplesets/{set}.lock.json",
        sources=recipe_sources,
    output:
        items="samplesets/{set}.parquet",
    log:
        "logs/samples/{set}.log",
    benchmark:
        "benchmarks/samples/{set}.tsv"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("samples"),
    script:
        "../scripts/samples.py"
