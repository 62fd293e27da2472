"""From gates and facts to one status, by precedence."""

import jsonschema
import pytest
from pydantic import ValidationError
from synthetic import ALL_SERVED, SERVED, TOOL, World, check, devices, instance

from assay.errors import StoreError
from assay.records import FailureKind, Status
from assay.verdicts.decide import judge_run, undecided_verdict
from assay.verdicts.model import (
    Cleanup,
    ConfigInfo,
    Coverage,
    Death,
    Facts,
    Instance,
    Samples,
    Startup,
    StartupFailure,
    Verdict,
    most_telling,
    parse_verdict,
    verdict_schema,
)
from assay.verdicts.scoretable import ScoreTable


def judge(world: World, **facts) -> Verdict:
    return judge_run(world.table(), world.margins(), world.facts(**facts), TOOL)


def with_instances(first: dict | None = None, second: dict | None = None) -> dict:
    changes = {0: first or {}, 1: second or {}}
    return {"instances": tuple(instance(number, arms, **changes[number]) for number, arms in SERVED.items())}


def never(kind: str) -> dict:
    failure = StartupFailure(kind=kind, message="limit of 300 s passed", exit_code=1)
    return {"startup": Startup(ready=False, seconds=300.0, failure=failure)}


def without(world: World, *arms: str) -> World:
    for arm in arms:
        del world.arms[arm]
    return world


def test_a_clean_run_passes_and_claims_its_bound():
    verdict = judge(World(dtype="float32"))
    assert verdict.verdict is Status.PASS
    assert (verdict.claim.bad, verdict.claim.n, round(verdict.claim.rate_upper95, 4)) == (0, 32, 0.0894)
    assert "8.94 %" in verdict.reason
    assert (verdict.coverage.planned, verdict.coverage.scored) == (96, 96)


def test_a_verdict_survives_json_and_its_own_schema():
    verdict = judge(World(needles=4))
    content = verdict.model_dump(mode="json")
    jsonschema.validate(content, verdict_schema())
    assert parse_verdict(content, "x.json") == verdict


def test_unknown_keys_of_a_verdict_are_refused_by_name():
    content = judge(World()).model_dump(mode="json") | {"colour": "green"}
    with pytest.raises(StoreError, match=r"x\.json: colour"):
        parse_verdict(content, "x.json")


def test_coverage_that_does_not_close_is_refused():
    with pytest.raises(ValidationError, match="does not close"):
        Coverage(planned=3, scored=2)


def test_a_failing_gate_leads_the_reason():
    world = World()
    world.serve(noise=1.0)
    verdict = judge(world)
    assert verdict.verdict is Status.FAIL
    assert verdict.reason.startswith("G-hard on served_0_alone: 32 items")


def test_of_the_gates_that_fail_the_one_that_names_most_items_leads():
    world = World()
    world.serve(noise=1.0)  # every item has a hit of G-hard; one alone breaks the contract
    for arm in ALL_SERVED:
        world.arms[arm].values["bos_ok"][0] = 0
    verdict = judge(world)
    failing = [gate for gate in verdict.gates if gate.status is Status.FAIL]
    assert failing[0].id == "G-struct" and failing[0].value == 1
    assert verdict.reason.startswith("G-hard on served_0_alone: 32 items")
    told = [gate.id for gate in most_telling(verdict.gates, 32)]
    assert told.index("G-hard") < told.index("G-mean") < told.index("G-struct") < told.index("G-coverage")


def test_a_lost_response_fails_coverage_with_its_reason():
    world = World()
    world.arms["served_0_load"].fail(3)
    verdict = judge(world, failures={("served_0_load", "item-000003"): "HTTP 500"})
    assert verdict.verdict is Status.FAIL
    assert "item-000003 on served_0_load: HTTP 500" in verdict.reason
    assert [(entry.item_id, entry.reason) for entry in verdict.coverage.failed] == [("item-000003", "HTTP 500")]


def test_a_response_without_any_record_is_missing():
    world = World()
    full = world.scores()
    rows = full.filter(
        [
            not (a == "served_1_load" and i == "item-000001")
            for a, i in zip(full["arm"].to_pylist(), full["item_id"].to_pylist(), strict=True)
        ]
    )
    verdict = judge_run(ScoreTable.from_tables([rows], world.items), world.margins(), world.facts(), TOOL)
    assert verdict.verdict is Status.FAIL
    assert [entry.item_id for entry in verdict.coverage.missing] == ["item-000001"]
    assert [gate.arm for gate in verdict.gates if gate.status is Status.FAIL] == ["served_1_load"]


def test_a_server_that_dies_mid_run_fails_coverage_and_the_reason_says_so():
    world = World()
    world.arms["served_1_load"].fail(31)
    verdict = judge(world, **with_instances(second={"died": Death(message="killed by signal 9")}))
    assert verdict.verdict is Status.FAIL
    assert "killed by signal 9" in verdict.reason


def test_a_server_that_exits_before_it_is_ready_fails_at_startup():
    verdict = judge(without(World(), *ALL_SERVED), **with_instances(never("exited"), never("exited")))
    assert verdict.verdict is Status.FAIL
    assert verdict.reason.startswith("startup: instance 0 ended by itself")


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - {FailureKind.EXITED}))
def test_a_server_that_never_came_up_for_another_reason_is_an_error(kind):
    verdict = judge(without(World(), *ALL_SERVED), **with_instances(never(kind), never(kind)))
    assert verdict.verdict is Status.ERROR
    assert "nothing was measured" in verdict.reason


def test_an_instance_that_answers_otherwise_than_the_other_is_no_pass():
    world = World()
    world.add("served_1_load", noise=1.0)
    verdict = judge(world)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert "the instances differ" in verdict.reason


def test_a_fault_stands_when_the_confirming_instance_never_came_up():
    world = World()
    world.serve(noise=1.0)
    verdict = judge(without(world, "served_1_load"), **with_instances(second=never("not_ready")))
    assert verdict.verdict is Status.FAIL
    hard = next(gate for gate in verdict.gates if gate.id == "G-hard")
    assert not hard.confirm.performed


def test_an_identity_that_changed_is_an_error_even_with_failing_gates():
    world = World()
    world.serve(noise=1.0)
    verdict = judge(world, **with_instances({"changed": ["commit"]}))
    assert verdict.verdict is Status.ERROR
    assert "commit" in verdict.reason


def test_leftovers_are_an_error_that_names_them_and_a_kill_is_a_caveat():
    left = {"pid": 7, "started_utc": "2026-11-30T12:00:00.000+00:00", "command": "python worker.py"}
    dirty = Cleanup(stopped_by="SIGTERM", clean=False, leftover=[left], port_free=True)
    verdict = judge(World(), **with_instances({"cleanup": dirty}))
    assert verdict.verdict is Status.ERROR
    assert "left python worker.py (pid 7 since 2026-11-30T12:00:00.000+00:00), its port free" in verdict.reason
    killed = Cleanup(stopped_by="SIGKILL", clean=True, port_free=True)
    verdict = judge(World(), **with_instances({"cleanup": killed}))
    assert (verdict.verdict, [caveat.code for caveat in verdict.caveats]) == (Status.PASS_WITH_CAVEAT, ["killed"])


def test_workers_that_outlived_their_server_are_a_caveat_that_names_them():
    worker = {"pid": 7, "started_utc": "2026-11-30T12:00:00.000+00:00", "command": "python worker.py"}
    unseen = {"pid": 8, "started_utc": None, "command": None}
    stopped = Cleanup(stopped_by="SIGTERM", clean=True, orphans=[worker, unseen], port_free=True)
    verdict = judge(World(), **with_instances({"cleanup": stopped}))
    assert (verdict.verdict, [caveat.code for caveat in verdict.caveats]) == (Status.PASS_WITH_CAVEAT, ["orphans"])
    [caveat] = verdict.caveats
    assert "workers of instance 0 outlived it and were ended: " in caveat.detail
    assert "python worker.py (pid 7 since 2026-11-30T12:00:00.000+00:00), a process (pid 8)" in caveat.detail


def test_no_planned_item_is_an_error():
    world = World()
    verdict = judge_run(ScoreTable([]), {}, world.facts(), TOOL)
    assert (verdict.verdict, verdict.coverage.planned) == (Status.ERROR, 0)


def test_a_broken_reference_is_an_error_not_a_fail():
    world = World()
    world.serve(noise=1.0)
    world.arms["judge"].undefine("margin_max", 0, "nonfinite")
    assert judge(world).verdict is Status.ERROR
    world = World()
    world.add("judge", noise=1.0)
    assert "does not agree with its own" in judge(world).reason


def test_a_judge_without_a_finite_number_for_an_answer_is_an_error_not_a_fail():
    world = World()
    world.arms["served_0_load"].undefine("margin_max", 7, flag="nonfinite")
    verdict = judge(world)
    assert verdict.verdict is Status.ERROR
    assert "no finite number for 1 answers of 'served_0_load', first item-000007" in verdict.reason


def test_one_instance_is_a_caveat():
    verdict = judge(without(World(), "served_1_load"), instances=(instance(0, SERVED[0]),))
    assert [caveat.code for caveat in verdict.caveats] == ["single_instance"]


def test_an_image_without_a_digest_is_a_caveat_that_names_it():
    config = ConfigInfo(name="synthetic", modality="text", image_by_tag="org/engine:v1")
    verdict = judge(World(), config=config)
    assert [caveat.code for caveat in verdict.caveats] == ["image_by_tag"]
    assert "org/engine:v1 ran without a digest" in verdict.caveats[0].detail


def test_requests_that_needed_a_second_attempt_are_counted_and_a_caveat():
    verdict = judge(World(), retried=2)
    assert verdict.coverage.retried == 2
    assert [caveat.code for caveat in verdict.caveats] == ["retried"]
    assert "2 of 96 requests" in verdict.caveats[0].detail


# --- devices and logs ---


def on_devices(**seen) -> Verdict:
    """A healthy run whose first instance held devices, and saw this of them."""
    return judge(World(), **with_instances({"devices": devices(**seen)}))


def caveats(verdict: Verdict) -> dict[str, str]:
    return {caveat.code: caveat.detail for caveat in verdict.caveats}


def test_devices_that_nothing_happened_to_change_no_verdict():
    verdict = on_devices()
    assert (verdict.verdict, verdict.caveats) == (Status.PASS, [])
    assert parse_verdict(verdict.model_dump(mode="json"), "x.json") == verdict


def test_a_stranger_on_the_devices_is_a_caveat_that_names_it():
    strangers = [{"pid": 666, "name": "python3", "device": "HIP 1"}, {"pid": 667, "name": None, "device": "HIP 0"}]
    verdict = on_devices(strangers=strangers)
    assert verdict.verdict is Status.PASS_WITH_CAVEAT
    who = "python3 (pid 666) on HIP 1, a process (pid 667) on HIP 0"
    assert caveats(verdict) == {"co_tenant": f"instance 0: others used its devices while it ran: {who}"}


@pytest.mark.parametrize(
    ("during", "why"),
    [
        ({"astray": ["HIP 5"]}, "its processes were on HIP 5, which it was not given"),
        ({"unused": ["HIP 1"]}, "none of its processes was seen on HIP 1, which it was given"),
    ],
)
def test_a_server_that_was_not_on_its_own_devices_alone_is_a_caveat(during, why):
    verdict = on_devices(**during)
    assert verdict.verdict is Status.PASS_WITH_CAVEAT
    assert caveats(verdict) == {"device_use": f"instance 0: {why}"}


def test_devices_of_a_server_that_never_came_are_not_said_to_be_unused():
    came = {"devices": devices(unused=["HIP 0", "HIP 1"])} | never("not_ready")
    verdict = judge(without(World(), *ALL_SERVED), **with_instances(came, never("not_ready")))
    assert "device_use" not in caveats(verdict)


@pytest.mark.parametrize(("report", "when"), [("before", "before"), ("health", "while"), ("after", "after")])
@pytest.mark.parametrize("outcome", ["warn", "unknown"])
def test_a_gate_that_warns_or_cannot_tell_is_a_caveat_that_says_when(report, when, outcome):
    verdict = on_devices(**{report: [check("memory", outcome, "not told")]})
    assert verdict.verdict is Status.PASS_WITH_CAVEAT
    assert caveats(verdict) == {"device_health": f"instance 0: {when} it ran: memory on HIP 1: not told"}


@pytest.mark.parametrize(
    ("during", "why"),
    [
        ({"failed": ["the sensor is gone", "and again"]}, "the sensor is gone"),
        (
            {"blind": ["HIP 0", "HIP 1"]},
            "no source lists the processes on HIP 0; no source lists the processes on HIP 1",
        ),
        ({"looks": 0}, "its devices were never looked at while it ran"),
        ({"looks": 0, "failed": ["no"]}, "no; its devices were never looked at while it ran"),
    ],
)
def test_devices_that_could_not_be_watched_are_a_caveat(during, why):
    verdict = on_devices(**during)
    assert verdict.verdict is Status.PASS_WITH_CAVEAT
    assert caveats(verdict) == {"device_unwatched": f"instance 0: {why}"}


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ({"after": [check("memory_returned", "refuse", "went up"), check("other", "unknown", "x")]}, "went up"),
        ({"error": "no device 1"}, "no device 1"),
    ],
)
def test_devices_that_are_not_left_as_they_were_are_an_error_that_says_why(after, why):
    verdict = on_devices(**after)
    assert verdict.verdict is Status.ERROR
    assert verdict.reason.startswith("instance 0 did not leave its devices as they were: ")
    assert verdict.reason.endswith(why)


def test_a_fault_of_the_devices_is_an_error_before_any_gate_is_believed():
    world = World()
    world.serve(noise=1.0)
    assert judge(world).verdict is Status.FAIL
    faulty = {"devices": devices(health=[check("ecc_uncorrectable", "refuse", "3, wanted: 0")])}
    for served in (world, World()):
        verdict = judge(served, **with_instances(faulty))
        assert verdict.verdict is Status.ERROR
        why = "the devices of instance 0 had faults while it ran: ecc_uncorrectable on HIP 1: 3, wanted: 0"
        assert verdict.reason == why


def test_an_error_by_what_could_not_be_read_says_what_that_is():
    found = devices(after=[check("memory_returned", "unknown", "not told")]).model_dump()
    found["after"]["outcome"] = "refuse"  # of a site with on_unknown: refuse
    verdict = judge(World(), **with_instances({"devices": found}))
    assert verdict.verdict is Status.ERROR
    assert verdict.reason.endswith("did not leave its devices as they were: memory_returned on HIP 1: not told")


def test_a_fault_of_the_server_is_told_before_what_it_left_on_its_devices():
    world = World()
    world.serve(noise=1.0)
    left = devices(after=[check("memory_returned", "refuse", "went up")])
    assert judge(world, **with_instances({"devices": left})).verdict is Status.FAIL


def test_another_provider_than_was_asked_for_is_an_error_even_with_failing_gates():
    world = World()
    assert (
        judge(world, **with_instances({"facts": Facts(statements={"execution_provider": "CPU"})})).verdict
        is Status.PASS
    )
    refused = Facts(refused="execution providers ['ROCM'] were asked for")
    verdict = judge(world, **with_instances(second={"facts": refused}))
    assert (verdict.verdict, verdict.reason) == (Status.ERROR, f"instance 1: {refused.refused}")
    world.serve(noise=1.0)
    assert judge(world, **with_instances(second={"facts": refused})).verdict is Status.ERROR


# --- controls ---


def test_planted_faults_are_caught_and_healthy_arms_pass():
    world = World(floors=4)
    world.control("noise", "G-logprob", noise=0.3)
    verdict = judge(world)
    assert verdict.verdict is Status.PASS
    assert [control.got for control in verdict.controls.positive] == [Status.FAIL]
    assert {control.got for control in verdict.controls.negative} == {Status.PASS}
    assert len(verdict.controls.negative) == 4 * 6
    assert verdict.controls.null_p_ks > 0.001


def test_a_gate_blind_to_its_planted_fault_is_an_error():
    world = World()
    world.control("nothing", "G-logprob")
    verdict = judge(world)
    assert verdict.verdict is Status.ERROR
    assert verdict.reason.startswith("gate blind: G-logprob misses the planted fault 'nothing'")


def test_a_fail_of_a_blind_gate_is_not_believed():
    world = World(dtype="float32")
    deltas = world.rng.normal(0, 0.01, world.gaps.shape)
    world.serve(margins=world.tokens["judge"], deltas=deltas)
    assert judge(world).verdict is Status.FAIL
    world.control("a", "G-logprob")
    world.control("b", "G-KL")
    assert judge(world).verdict is Status.ERROR


def test_a_control_without_scores_is_an_error():
    world = World()
    world.controls["forgotten"] = "G-hard"
    assert judge(world).verdict is Status.ERROR


def test_a_control_whose_gate_has_no_evidence_is_not_applicable():
    world = World(needles=3)
    for arm in ALL_SERVED:
        world.arms[arm].undefine("logprob_rms")
    world.controls |= {"shifted": "G-logprob", "lost": "G-needle", "hot": "G-surprisal"}
    verdict = judge(world)
    assert {control.got for control in verdict.controls.positive} == {"not_applicable"}
    assert verdict.verdict is Status.PASS_WITH_CAVEAT


def test_a_floor_arm_that_fails_against_the_others_makes_the_gate_trigger_happy():
    world = World(floors=3)
    world.add(world.floor_arms[0], noise=0.2)
    verdict = judge(world)
    assert verdict.verdict is Status.ERROR
    assert "trigger-happy" in verdict.reason
    assert world.floor_arms[0] in verdict.reason


# --- other ---


def test_an_unsupported_config_says_why():
    verdict = undecided_verdict(ConfigInfo(name="big"), Status.UNSUPPORTED, "no reference yet", TOOL)
    assert (verdict.verdict, verdict.reason) == (Status.UNSUPPORTED, "no reference yet")
    assert parse_verdict(verdict.model_dump(mode="json"), "x") == verdict


def test_a_backend_that_is_not_the_one_asked_for_is_a_caveat():
    said = {"attention main": "asked ROCM_AITER_FA → picked TRITON_ATTN (line 9)"}
    verdict = judge(World(), **with_instances(second={"facts": Facts(statements=said, otherwise=["attention main"])}))
    (caveat,) = verdict.caveats
    assert caveat.code == "not_as_asked" and said["attention main"] in caveat.detail and "instance 1" in caveat.detail
    assert judge(World(), **with_instances(second={"facts": Facts(statements=said)})).caveats == []


def test_an_instance_is_read_from_its_files_and_an_unmeasured_end_counts_as_changed():
    identity = {
        "instance": 0,
        "start": {"version": "1"},
        "end": None,
        "changed": None,
        "startup": {"ready": True, "seconds": 2.0, "failure": None},
        "died": None,
        "devices": None,
    }
    cleanup = {"stopped_by": "SIGINT", "seconds": 1.0, "exit_code": 0, "leftover": [], "port_free": True, "clean": True}
    said = {"attention main": "unknown: not logged"}
    facts = {"statements": said, "unmatched": [{}], "otherwise": [], "refused": None}
    found = Instance.measured(identity, cleanup, facts, ["served_0_alone"])
    assert found.changed and found.devices is None
    assert found.facts == Facts(statements=said, unmatched=1)
    held = devices().model_dump(mode="json")
    assert Instance.measured(identity | {"devices": held}, cleanup, facts, []).devices == devices()
    assert Instance.measured(identity, cleanup, facts | {"refused": "no"}, []).facts.refused == "no"
    died = identity | {"died": {"message": "exited with 1", "exit_code": 1, "log_tail": ""}}
    assert not Instance.measured(died, cleanup, facts, ["served_0_alone"]).changed


@pytest.mark.parametrize(("dtype", "floors"), [("bfloat16", 2), ("bfloat16", 4), ("float32", 2)])
def test_healthy_servers_with_fresh_noise_on_every_pass_never_fail(dtype, floors):
    for seed in range(5):
        world = World(dtype=dtype, floors=floors, seed=100 + seed)
        for arm in ALL_SERVED:
            world.add(arm)
        assert judge(world).verdict in (Status.PASS, Status.PASS_WITH_CAVEAT)


def test_outputs_of_a_modality_that_nothing_judges_are_refused():
    with pytest.raises(StoreError, match="modality 'smell' cannot be judged; known: text"):
        judge(World(), config=ConfigInfo(name="x", modality="smell"))


def test_the_kinds_of_items_are_counted_and_nothing_but_counts_is_taken():
    samples = judge(World(needles=5)).samples
    assert samples.model_dump() | {"items_sha256": ""} == {
        "planned": 32,
        "items_sha256": "",
        "greedy": 32,
        "sampled": 0,
        "needles": 5,
    }
    for wrong in (-1, "many", None):
        with pytest.raises(ValidationError):
            Samples(planned=1, items_sha256="", greedy=wrong)
