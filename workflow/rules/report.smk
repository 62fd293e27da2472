rule report:
    input:
        unpack(report_inputs),
        verdict="results/verdicts/{config}.json",
        templates=report_templates(),
    output:
        report="results/reports/{config}.html",
    log:
        "logs/report/{config}.log",
    benchmark:
        "benchmarks/report/{config}.tsv"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        code=picked_code("report"),
    script:
        "../scripts/report.py"
