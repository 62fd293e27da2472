"""What the head process does while jobs wait for their turn."""

import re


def test_waiting_jobs_are_looked_at_when_another_ended_and_not_every_second(workspace):
    plans = [f"results/serve/faults_32+{name}.json" for name in ("rerun", "rows_1", "rows_2", "rows_4", "rows_8")]
    done = workspace.snakemake("--verbose", "--cores", "1", "--force", "--", *plans)
    text = done.stdout + done.stderr
    jobs = len(re.findall(r"^Finished jobid", text, re.M))
    assert jobs >= len(plans)
    assert len(re.findall(r"^Ready jobs", text, re.M)) <= jobs + 1
