rule fault_matrix:
    input:
        verdicts=matrix_verdicts,
    output:
        page="docs/faults/{config}.md",
    log:
        "logs/fault_matrix/{config}.log",
    benchmark:
        "benchmarks/fault_matrix/{config}.tsv"
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        faults=matrix_faults,
        code=code("fault_matrix"),
    script:
        "../scripts/fault_matrix.py"
