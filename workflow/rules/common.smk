# Look-ups that rules share. Functions only; the configuration is read and checked once, here.
import gc
import math
import sys
from functools import cache
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

from assay import config as assay_config
from assay import failed, slurm
from assay.engines.plan import LIBRARY, ServePlan, python_of, recorded_plan, serve_plan, within
from assay.errors import AssayError
from assay.fingerprint import command_fingerprint, fingerprint
from assay.provenance import LIBRARIES, versions
from assay.records import JUDGE
from assay.samples.recipe import read_recipe

gc.set_threshold(50_000)  # nothing of a growing plan is garbage: looking for some takes a quarter of building it


def for_people(function, *arguments):
    """Call a library function; a user's mistake becomes one message without a traceback."""
    try:
        return function(*arguments)
    except AssayError as error:
        raise WorkflowError(str(error)) from None


for_people(slurm.check_profile, sys.argv[1:], Path(workflow.basedir))
CONFIG = for_people(assay_config.load, config)
SLURM = slurm.resources(CONFIG.site)  # for every job that is not local
NAME = assay_config.NAME
VERSIONS = versions(LIBRARIES)  # of what computes the reference
RUN_FIRST = "run it once without the rescore profile"


def site_configs():
    """Configs that this site can say something of."""
    return [name for name in CONFIG.configs if CONFIG.offered(name)]


def all_verdicts(wildcards):
    """A verdict for every config that this site offers, unsupported ones included; when rescoring, that has a record."""
    names = [name for name in site_configs() if not CONFIG.settings.rescore or for_people(recorded_plan, name)]
    if not names:
        raise WorkflowError(f"nothing is recorded of any config: {RUN_FIRST}")
    return [f"results/verdicts/{name}.json" for name in names]


def known_wrong():
    """Configs that must FAIL."""
    return sorted(name for name in site_configs() if getattr(CONFIG.configs[name], "known_wrong", None))


def code(stage):
    """Digest of the code that a stage runs, for its params."""
    return fingerprint(f"workflow/scripts/{stage}.py")


def picked_code(stage):
    """Params function: digest of the code that a stage runs for the modality of a config, or else of a sample set."""

    def digest(wildcards):
        if "config" in wildcards.keys():
            modality = plan(wildcards).get("modality")  # an unsupported config has none
        else:
            modality = for_people(read_recipe, wildcards.set).modality
        return fingerprint(f"workflow/scripts/{stage}.py", modality)

    return digest


def manifest(source):
    return f"resources/{source}/manifest.json"


def plan(wildcards):
    """The serve plan, which `snakemake -n` prints: from the configuration, or, when rescoring, as the run recorded it."""
    return plan_of(wildcards.config)


@cache  # some thirty look-ups of each config need it
def plan_of(name):
    if not CONFIG.settings.rescore:
        return for_people(serve_plan, CONFIG, name)
    recorded = for_people(recorded_plan, name)
    if recorded is None:
        raise WorkflowError(f"nothing is recorded of config '{name}': {RUN_FIRST}")
    return ServePlan(recorded)


def sets_of(wildcards):
    """Sample sets that a config is judged on."""
    return [f"samplesets/{name}.parquet" for name in plan(wildcards)["sets"]]


def planned_sets(wildcards):
    """Sample sets that a config's plan must be able to ask for; none of an unsupported one."""
    return [] if plan(wildcards)["unsupported"] else sets_of(wildcards)


def reference_responses(wildcards):
    """What the reference of a config answered, by sample set and reference arm."""
    chosen = plan(wildcards)
    folder = f"results/reference/{chosen['reference']['model']}"
    return [f"{folder}/{name}/{arm}.parquet" for name in chosen["sets"] for arm in chosen["reference"]["arms"]]


def reference_judged(wildcards):
    """What was judged of the reference of a config, by sample set."""
    chosen = plan(wildcards)
    folder = f"results/judged/reference/{chosen['reference']['model']}"
    return [f"{folder}/{name}/{chosen['reference']['floor']}.parquet" for name in chosen["sets"]]


def floor_responses(wildcards):
    """What the judge and the arms of a floor answered to a sample set."""
    folder = f"results/reference/{wildcards.model}/{wildcards.set}"
    return [f"{folder}/{arm}.parquet" for arm in (JUDGE, *assay_config.floor_arms(wildcards.floor))]


def instance_files(folder, suffix):
    """Input function: one file per server instance of a config."""

    def files(wildcards):
        count = len(plan(wildcards)["instances"])
        return [f"{folder}/{wildcards.config}/{number}{suffix}" for number in range(count)]

    return files


def gate_options(wildcards):
    """Scoring options in effect today."""
    resolved = for_people(CONFIG.resolve, wildcards.config)
    return None if resolved.unsupported else resolved.gates.model_dump(mode="json")


def served_needs(wildcards):
    """What an instance of a config asks of its machine."""
    return for_people(CONFIG.resolve, wildcards.config).needs


def served_mb(wildcards):
    return memory_mb(served_needs(wildcards))


def served_minutes(wildcards):
    return served_needs(wildcards).minutes


def served_gres(wildcards):
    """What an instance of a config asks SLURM for; nothing elsewhere."""
    return slurm.gres(CONFIG.site, plan(wildcards)["gpus"])


def judge_needs(wildcards):
    """What judging a config, or a reference model, asks of its machine."""
    model = wildcards.model if "model" in wildcards.keys() else plan(wildcards)["reference"]["model"]
    return for_people(CONFIG.judge_needs, model)


def judge_gres(wildcards):
    """What a reference or judge job asks SLURM for; nothing elsewhere."""
    return slurm.gres(CONFIG.site, CONFIG.site.borrowed["gpus"])


def judge_mb(wildcards):
    return memory_mb(judge_needs(wildcards))


def judge_minutes(wildcards):
    return judge_needs(wildcards).minutes


def memory_mb(needs):
    return math.ceil(needs.memory_gib * 1024)  # SLURM's MB are MiB


def served_manifest(wildcards):
    """Manifest of the weights that a config's server loads."""
    chosen = plan(wildcards)
    return [] if chosen["unsupported"] else manifest(chosen["model"]["source"])


def served_environment(wildcards):
    """Manifest of the environment that a config's server runs in; the project's, a checkout's and an image's have none."""
    environment = plan(wildcards)["environment"]
    return environment_manifest(environment and environment["name"])


def environment_manifest(name):
    """Manifest of an environment that is built here; none of the project's, a checkout's or of no environment."""
    built = name not in (None, assay_config.PROJECT, assay_config.TREE)
    return f"resources/environments/{name}/manifest.json" if built else []


def recipe(wildcards):
    """A sample set's recipe, subsets resolved."""
    return for_people(read_recipe, wildcards.set).model_dump(mode="json")


def recipe_sources(wildcards):
    """Manifests of the sources that a sample set is built from."""
    return [manifest(name) for name in for_people(read_recipe, wildcards.set).inputs]


def source_pin(wildcards):
    return for_people(assay_config.lookup, CONFIG.sources, wildcards.source, "source").model_dump(mode="json")


def origins(wildcards):
    """Manifests of the sources that a converted source is made from."""
    return [manifest(name) for name in source_pin(wildcards).get("origins", [])]


def judge_manifest(wildcards):
    """Manifest of the weights that judge a config."""
    return manifest(plan(wildcards)["reference"]["judge"])


def judge_manifest_of_model(wildcards):
    """Manifest of the weights that judge the reference of a model."""
    return manifest(for_people(CONFIG.judge_model, wildcards.model))


def speaker_manifest(options):
    """Input function: manifest of the network that tells speakers apart, by the judge's `options`, if it is to."""

    def file(wildcards):
        source = options(wildcards).get("speaker_encoder")
        return manifest(source) if source else []

    return file


def reference_manifest(wildcards):
    return manifest(assay_config.source_of(wildcards.model))


def reference_options(wildcards):
    """How the reference of a model is run; of a command, its interpreter and the digest of our code that it runs."""
    options = for_people(CONFIG.reference_options, wildcards.model)
    if "command" not in options:
        return options
    here = {"python": python_of(options["environment"]), "library": within(LIBRARY)}
    return options | here | {"code": command_fingerprint(options["command"])}


def reference_environment(wildcards):
    """Manifest of the environment that the reference of a model runs in; the project's has none."""
    return environment_manifest(for_people(CONFIG.reference_options, wildcards.model).get("environment"))


def judge_options(wildcards):
    """How the judge of a model computes."""
    return for_people(CONFIG.judge_options, wildcards.model)


def log_rules(wildcards):
    """Rules that read the log of a config's server."""
    rules = for_people(CONFIG.rules_of, plan(wildcards)["arm"])
    return {name: rule.model_dump(mode="json") for name, rule in rules.items()}


def served_judge_options(wildcards):
    """How the judge of a config computes."""
    return assay_config.judge_options(plan(wildcards)["reference"])


def verdict_inputs(wildcards):
    """What a verdict is decided from: of an unsupported config its plan alone, else what its run left."""
    if plan(wildcards)["unsupported"]:
        return {"plan": f"results/serve/{wildcards.config}.json"}
    return {
        "scores": f"results/scores/{wildcards.config}.parquet",
        "floor": f"results/floors/{wildcards.config}.parquet",
        "responses": instance_files("results/outputs", ".parquet")(wildcards),
        "tokens": f"results/judged/{wildcards.config}.parquet",
        "identities": instance_files("results/outputs", ".identity.json")(wildcards),
        "cleanups": instance_files("results/outputs", ".cleanup.json")(wildcards),
        "facts": instance_files("results/facts", ".json")(wildcards),
        "sets": sets_of(wildcards),
    }


def report_inputs(wildcards):
    """What the page on a verdict shows beside it: of an unsupported config nothing."""
    if plan(wildcards)["unsupported"]:
        return {}
    return {
        "scores": f"results/scores/{wildcards.config}.parquet",
        "floor": f"results/floors/{wildcards.config}.parquet",
        "responses": instance_files("results/outputs", ".parquet")(wildcards),
        "tokens": f"results/judged/{wildcards.config}.parquet",
        "reference_responses": reference_responses(wildcards),
        "reference_tokens": reference_judged(wildcards),
        "sets": sets_of(wildcards),
        "model": judge_manifest(wildcards),
    }


def report_templates():
    """What a page is made from beside code."""
    folder = "workflow/assay/report/templates"
    return expand(f"{folder}/{{file}}", file=sorted(glob_wildcards(f"{folder}/{{file}}").file))


def matrix_faults(wildcards):
    """Faults and benign changes that can show on a config's sample sets."""
    resolved = for_people(CONFIG.resolve, wildcards.config)
    sampled = resolved.sets == ["sampled"]
    return {
        name: fault.model_dump(mode="json")
        for name, fault in CONFIG.faults.items()
        if fault.modality == resolved.family.modality and (fault.benign or fault.sampled == sampled)
    }


def matrix_verdicts(wildcards):
    """A config's own verdict, and that of each of its planted twins."""
    names = [wildcards.config, *(f"{wildcards.config}+{fault}" for fault in matrix_faults(wildcards))]
    return [f"results/verdicts/{name}.json" for name in names]


def without_verdict(told):
    """Config -> family and failed jobs, of the verdicts that this run was to make and did not; `told` by job number."""
    dag, blocked = workflow.dag, {}
    for lost in (member for job in workflow.scheduler.failed for member in (job.jobs if job.is_group() else [job])):
        failure = told.get(dag.jobid(lost)) or failed.without_files(lost.rule.name, lost.output, lost.log)
        for job in dag.bfs(dag.depending, lost):
            if job.rule.name == "verdict" and not dag.finished(job):
                name = job.wildcards.config
                family = getattr(CONFIG.resolve(name).entry, "family", None)
                blocked.setdefault(name, (family, []))[1].append(failure)
    return blocked
