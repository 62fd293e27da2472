"""A site's SLURM: what jobs ask for, what one was given, and what is said of a run that does not use it."""

import asyncio
from types import SimpleNamespace

import pytest
import yaml
from sites import FOLDER, on

from assay import slurm
from assay.config import Needs, Site, SiteSlurm
from assay.errors import ConfigError

WORKFLOW = FOLDER.parent


def site(**section):
    plain = on("mi325x").site
    return plain.model_copy(update={"slurm": SiteSlurm(**section) if section else None})


def test_jobs_ask_for_what_the_site_names_and_for_nothing_else():
    assert slurm.resources(site()) == {}
    assert slurm.resources(site(gres="gpu")) == {"slurm_extra": "--open-mode=append"}
    assert slurm.resources(site(partition="p", account="a", constraint="c")) == {
        "slurm_extra": "--open-mode=append",
        "slurm_partition": "p",
        "slurm_account": "a",
        "constraint": "c",
    }


def test_devices_are_asked_for_by_the_name_the_site_gives_them():
    assert slurm.gres(site(gres="gpu:mi325x"), 8) == "gpu:mi325x:8"
    assert slurm.gres(site(partition="p"), 2) == "gpu:2"
    assert slurm.gres(site(gres="gpu"), 0) is None
    assert slurm.gres(site(), 8) is None


def test_an_instance_asks_for_what_its_family_and_its_arm_need():
    config = on("mi300x")
    resolved = config.resolve("qwen3_5_9b_vllm")
    _, family, arm = resolved.served
    family = family.model_copy(
        update={"needs": family.needs.model_copy(update={"serve": Needs(memory_gib=40, minutes=30)})}
    )
    arm = arm.model_copy(update={"memory_gib": 24.5, "start_limit_s": 601})
    needs = resolved.model_copy(update={"family": family, "arm": arm}).needs
    assert needs == Needs(memory_gib=64.5, minutes=41)  # 30 + 601 s, begun minutes count


def test_a_judge_that_families_share_gets_what_the_largest_asks_for():
    config = on("embedded")
    small, large = (config.families[name] for name in ("smollm2_135m", "smollm2_135m_faults"))
    large = large.model_copy(update={"needs": large.needs.model_copy(update={"judge": Needs(memory_gib=9, minutes=5)})})
    changed = config.model_copy(update={"families": {"small": small, "large": large}})
    assert changed.judge_needs("smollm2_135m") == Needs(memory_gib=9, minutes=60)


def test_what_slurm_gave_is_read_from_the_environment():
    assert slurm.allocation({"PATH": "x"}) is None
    env = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_JOB_GPUS": "0,1"}
    assert slurm.allocation(env) == {"job": "7", "node": "n1", "devices": "0,1"}
    assert slurm.allocation(env | {"SLURM_STEP_GPUS": "1"})["devices"] == "1"
    assert slurm.allocation({"SLURM_JOB_ID": "7"}) == {"job": "7", "node": None, "devices": None}


def log_of(*starts):
    """What a SLURM job printed, start after start."""
    return "".join(f"Host: vm\nBuilding DAG of jobs...\n{words}\n" for words in starts)


KILLED = "slurmstepd-n1: error: *** {} ON n1 CANCELLED AT 2026-11-30T15:28:24{} ***"
CANCELLED = "\n".join(
    ["srun: Job step aborted: Waiting up to 12 seconds for job step to finish.", KILLED.format("STEP 3.0", "")]
)


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (CANCELLED, "CANCELLED"),
        (KILLED.format("JOB 3", " DUE TO TIME LIMIT"), "TIMEOUT"),
        (KILLED.format("JOB 3", " DUE TO PREEMPTION"), "PREEMPTED"),
        (KILLED.format("JOB 3", " DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"), "NODE_FAIL"),
        # by SLURM's own watch; its step is then cancelled
        (f"slurmstepd-n1: error: StepId=1.0 exceeded memory limit (3 > 2), being killed\n{CANCELLED}", "OUT_OF_MEMORY"),
        # by the kernel, where SLURM keeps jobs in control groups
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the", "OUT_OF_MEMORY"),
        ("srun: error: n1: task 0: Out Of Memory", "OUT_OF_MEMORY"),
        ("15:28:24 ERROR rule generate failed", None),
        ("15:28:24 INFO the server said: RuntimeError: Out Of Memory", None),
    ],
)
def test_what_slurm_wrote_into_the_log_of_a_job_says_how_it_ended(words, state):
    assert slurm.ended_by(log_of(words)) == state
    assert slurm.ended_by(log_of(KILLED.format("JOB 3", " DUE TO PREEMPTION"), words)) == state  # queued again


def test_a_preempted_job_that_is_not_queued_again_has_ended_for_snakemake():
    found = {"1": "PREEMPTED", "2": "PENDING", "3": "COMPLETED"}

    async def query(command, logger):
        return (found, 0.1) if command == "squeue" else (None, None)

    plugin = SimpleNamespace(query_job_status=query)
    slurm.end_preempted(plugin)
    states = asyncio.run(plugin.query_job_status("squeue", None))
    assert states == ({"1": "CANCELLED", "2": "PENDING", "3": "COMPLETED"}, 0.1)
    assert asyncio.run(plugin.query_job_status("broken", None)) == (None, None)


@pytest.mark.parametrize(
    ("section", "local", "said"),
    [
        ({"partition": "p"}, True, "does not use it"),
        ({}, False, "no `slurm` section"),
        ({"partition": "p"}, False, None),
        ({}, True, None),
    ],
)
def test_a_run_that_does_not_fit_its_site_is_told(section, local, said):
    lines = slurm.warnings(site(**section), "s", local)
    assert [said in line for line in lines] == ([True] if said else [])


def test_a_cluster_that_forgets_jobs_before_snakemake_looks_is_told_of():
    (line,) = slurm.warnings(site(partition="p"), "s", False, 180)
    assert "SLURM forgets a job 180 s after its end" in line and "Ctrl-C" in line
    assert slurm.warnings(site(partition="p"), "s", False, 300) == []


@pytest.mark.parametrize(
    "argv",
    [
        ["--workflow-profile", "profiles/slum"],
        ["--workflow-profile=profiles/slum", "-n"],
        ["-n", "--workflow-profile", "slum", "--", "all"],
    ],
)
def test_a_profile_that_is_not_there_is_refused(argv):
    with pytest.raises(ConfigError, match=r"no workflow profile '(profiles/)?slum'.*known: profiles/default"):
        slurm.check_profile(argv, WORKFLOW)


@pytest.mark.parametrize("name", ["slurm", "profiles/slurm", "profiles/slurm/config.yaml", "none"])
def test_a_profile_that_is_there_is_taken(name, monkeypatch):
    monkeypatch.chdir(WORKFLOW)
    slurm.check_profile(["--workflow-profile", name, "all"], WORKFLOW)
    slurm.check_profile(["all"], WORKFLOW)


def test_a_site_may_not_give_a_count_with_the_name_of_its_devices():
    with pytest.raises(ValueError, match="pattern"):
        Site.model_validate(on("mi325x").site.model_dump() | {"slurm": {"gres": "gpu:mi325x:8"}})


def test_nothing_that_failed_is_tried_again_but_by_slurm_after_a_fault_of_its_own():
    profile = yaml.safe_load((WORKFLOW / "profiles/slurm/config.yaml").read_text())
    assert profile["slurm-requeue"] is True
    assert not {"retries", "restart-times", "default-resources"} & profile.keys()
    rules = "".join(path.read_text() for path in (WORKFLOW / "workflow/rules").glob("*.smk"))
    assert "retries:" not in rules


def test_no_config_waits_for_the_jobs_of_another():
    assert "group-components" not in yaml.safe_load((WORKFLOW / "profiles/slurm/config.yaml").read_text())


def test_the_profile_names_nothing_of_a_site():
    text = (WORKFLOW / "profiles/slurm/config.yaml").read_text()
    keys = yaml.safe_load(text).keys()
    assert not [
        key for key in keys if any(word in key for word in ("partition", "account", "gres", "constraint", "qos"))
    ]
