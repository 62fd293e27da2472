"""What a page says in its own words: statuses, caveats, the passes of a server."""

from __future__ import annotations

from assay.records import SERVED, Status

MEANING = {
    Status.PASS: "Nothing in this run tells the server from the reference, and the run would have shown a fault that "
    "the controls plant. It is a bound on how many answers can be bad, never a proof that none is.",
    Status.PASS_WITH_CAVEAT: "Nothing in this run tells the server from the reference, but the evidence has gaps or "
    "something is worth knowing: read the caveats before you rely on it.",
    Status.FAIL: "The server differs from the reference by more than harmless changes explain, or did not answer. "
    "Do not rely on what it serves until the failed gates below are explained.",
    Status.ERROR: "The run itself is wrong or measured nothing. It says nothing of the server, good or bad: mend the "
    "run and judge again.",
    Status.INCONCLUSIVE: "The evidence does not suffice to pass or to fail the server. The gates below say what is "
    "missing.",
    Status.UNSUPPORTED: "Assay cannot judge this configuration yet. Nothing was measured.",
}

LABELS = {
    Status.PASS: "Pass",
    Status.PASS_WITH_CAVEAT: "Pass with caveat",
    Status.FAIL: "Fail",
    Status.ERROR: "Error",
    Status.INCONCLUSIVE: "Inconclusive",
    Status.UNSUPPORTED: "Unsupported",
    Status.SKIPPED_OPTIONAL: "Not run",
}

SIGNS = {  # beside the colour, for those who do not see it
    Status.PASS: "✓",
    Status.PASS_WITH_CAVEAT: "✓",
    Status.FAIL: "✗",
    Status.ERROR: "!",
    Status.INCONCLUSIVE: "?",
    Status.UNSUPPORTED: "–",
    Status.SKIPPED_OPTIONAL: "–",
}

CAVEATS: dict[str, str] = {  # as the README has them
    "prompt_unchecked": "the server reports neither prompt ids nor a prompt token count: a changed prompt shows only "
    "in the answers",
    "retokenised": "the server returns text alone; it was encoded again, and so was the floor's",
    "lossy_items": "of a server that returns text alone, items (at most 10 %) that were not judged: the reference's "
    "own text encodes to other ids there",
    "sampled_not_judged": "sampled answers without token ids: G-surprisal and G-support did not run",
    "logprobs_missing": "no logprobs from the server, or not from every response: G-logprob and G-KL did not run, or "
    "on fewer items",
    "logprobs_processed": "the server's logprobs are those of a truncated or sharpened distribution: G-logprob and "
    "G-KL were skipped",
    "small_but_real": "worse than the floor beyond chance, but within the allowed limit",
    "not_reproduced": "single items that exceed `tau_hard` on one instance only, few enough for chance",
    "not_as_asked": "the log says that another backend or configuration runs than was asked for, or that processes "
    "run different ones",
    "needles_lost": "needles that the reference finds and the server lost, few enough for chance",
    "no_solved_needles": "the reference finds none of the needles: the gate has nothing to compare",
    "retried": "requests that were answered at the second attempt only, after a transport error",
    "image_by_tag": "the server's image was run by its tag, without a digest: nothing says that it is the same "
    "tomorrow",
    "co_tenant": "processes of others came onto the server's devices while it ran",
    "device_health": "a health gate warned of the devices before, during or after the run, or could not tell whether "
    "they were free",
    "device_use": "the server was seen on devices that it was not given, or never on one that it was given (did it "
    "fall back to the CPU?)",
    "device_unwatched": "looks at the devices failed while the server ran, or nothing lists the processes on them: "
    "others may have been there unseen",
    "killed": "the server stopped only when killed",
    "orphans": "workers of the server outlived it, and Assay ended them: started by hand, it would have left them on "
    "its devices",
    "single_instance": "no second instance: nothing could be confirmed on another",
    "self_consistency_only": "no reference: a fault that is always the same stays unseen (no text config has it)",
}

COMMON_WORDS = {
    "floor": "how far the reference differs from itself under changes that must not matter (another batch size, "
    "another kernel) at the server's own precision. What is no larger than that is no fault.",
    "limit": "how far a value may be above the floor before it matters. Where it comes from stands with each gate.",
    "p": "how likely a difference at least this large is by chance alone, were the server right; adjusted (by Holm's "
    "method) for the number of tests in this run. A statistical gate fails only beyond its limit, with a small p, "
    "adjusted and not, and if the other server confirms it.",
}


def pass_label(arm: str) -> str:
    """A served arm (`served_<instance>_<pass>`) for a person."""
    instance, _, name = arm.removeprefix(SERVED).partition("_")
    return f"server {instance}, {name}"
