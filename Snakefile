# Assay: correctness verdicts for multimodal model servers.
from snakemake.utils import min_version

min_version("9.27")


configfile: "config/config.yaml"


# The base system, for those who run with --sdm apptainer. The software is the project's own locked environment.
container: "docker://python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7"


include: "workflow/rules/common.smk"
include: "workflow/rules/fetch.smk"
include: "workflow/rules/environment.smk"
include: "workflow/rules/samples.smk"
include: "workflow/rules/serve_config.smk"
include: "workflow/rules/generate.smk"
include: "workflow/rules/facts.smk"
include: "workflow/rules/reference.smk"
include: "workflow/rules/judge.smk"
include: "workflow/rules/score.smk"
include: "workflow/rules/verdict.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/fault_matrix.smk"


wildcard_constraints:
    config=rf"{NAME}(\+{NAME})?",
    source=NAME,
    environment=NAME,
    model=rf"{NAME}(\+features)?",
    set=NAME,
    arm=r"judge|[a-z0-9]+-[a-z0-9]+",
    floor=r"[a-z0-9]+(-[a-z0-9]+)*",
    instance=r"\d+",


# What needs the network, or less time than submitting it.
localrules:
    all,
    environment,
    facts,
    fault_matrix,
    fetch,
    gate,
    junit,
    report,
    samples,
    serve_config,


rule all:
    default_target: True
    input:
        all_verdicts,


FAILED = failed.FailedJobs()
logger.addHandler(FAILED)


onstart:
    failed.forget()
    # For its limit of submissions, 100 a second, Snakemake looks at all waiting jobs again every second, and once more
    # for each job that ended; nothing here comes near the limit.
    workflow.scheduler.job_rate_limiter = None
    plugin = None if workflow.local_exec else sys.modules.get("snakemake_executor_plugin_slurm")
    if plugin:
        slurm.end_preempted(plugin)
    min_job_age_s = plugin and plugin.get_min_job_age()
    for warning in slurm.warnings(CONFIG.site, CONFIG.settings.site, workflow.local_exec, min_job_age_s):
        logger.warning(warning)


onerror:
    for line in failed.write_errors(without_verdict(FAILED.jobs)):
        logger.error(line)
