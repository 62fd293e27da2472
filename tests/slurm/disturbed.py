"""A sweep that a cluster does to what clusters do: caught while its servers answer, disturbed, and run again.

Jobs are caught by letting their scripts stand still. SLURM lets a process go on before it ends it, so what follows is
what would have followed anyway.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
from processes import wait_until
from tiny_sweep import CONFIGS, HUNGRY, OPTIONS, VERDICTS, SlurmWorkspace, give_memory

from assay.gate import read_verdict
from assay.verdicts.model import Verdict

LIMIT_S = 600  # on a busy machine
GONE_S = 60
LOOK_S = 0.5  # at the queue, and at processes
MASK = "ROCR_VISIBLE_DEVICES"
TARGETS = (*VERDICTS, f"results/verdicts/{HUNGRY}.json")


@dataclass(frozen=True)
class Held:
    """Devices of a node that one server had to itself, and when."""

    node: str
    devices: frozenset[str]
    since: str  # UTC
    until: str


@dataclass(frozen=True)
class Job:
    """A job that something was done to, and what was left of it."""

    config: str
    number: str
    held: Held
    processes: tuple[str, ...] = ()  # that outlived it
    log: str = ""  # of the stage
    slurm_log: str = ""


@dataclass(frozen=True)
class Left:
    """What a run left."""

    said: str
    errors: dict[str, Verdict]
    files: frozenset[str]  # below results


@dataclass
class Disturbed:
    """The sweep; `jobs` by what was done to them."""

    workspace: SlurmWorkspace
    jobs: dict[str, Job] = field(default_factory=dict)
    runs: list[Left] = field(default_factory=list)

    def run(self, *command: str) -> str:
        """One of SLURM's commands."""
        return self.workspace.cluster.run(*command)

    def play(self) -> None:
        """Both runs."""
        with self._run() as process:
            lost = self._disturb()
            self._ended(process)
        self.workspace.cluster.start_node(lost)
        self.workspace.cluster.wait_idle()
        give_memory(self.workspace)
        self.run("scontrol", "update", "partitionname=gpu", "preemptmode=cancel")  # some partitions are like that
        with self._run() as process:
            (hungry,) = self._catch({HUNGRY})
            # Only servers ask for devices: when the others' jobs have ended, it is the only one that can be preempted.
            done = [self.workspace.path / f"results/facts/{name}/0.json" for name in CONFIGS]
            assert wait_until(lambda: all(path.exists() for path in done), LIMIT_S, LOOK_S), self._said()
            self._preempt(hungry.held.node, 2)
            self._gone("preempted for good", hungry)
            self._ended(process)

    def _disturb(self) -> str:
        """Do one thing to each of the jobs that are caught; returns the node that is lost."""
        jobs = sorted(self._catch(set(CONFIGS)), key=lambda job: job.config)
        kept, lost = dict.fromkeys(job.held.node for job in jobs)
        cancelled, late = (job for job in jobs if job.held.node == kept)
        there = [job for job in jobs if job.held.node == lost]
        self.run("scancel", cancelled.number)
        self.run("scontrol", "update", f"jobid={late.number}", "timelimit=1")
        self._gone("cancelled", cancelled)
        self._preempt(lost, 1)
        assert wait_until(lambda: "PENDING" in map(self._state, there), GONE_S, LOOK_S)
        preempted, bereft = sorted(there, key=lambda job: self._state(job) != "PENDING")
        self._gone("preempted", preempted)
        self.workspace.cluster.kill_node(lost)
        self._gone("node lost", bereft)
        assert wait_until(lambda: self._state(bereft) == "PENDING", 2 * GONE_S, LOOK_S)
        for job in (preempted, bereft):  # SLURM lets them rest for two minutes
            self.run("scontrol", "update", f"jobid={job.number}", "starttime=now")
        self._gone("out of time", late)
        return lost

    @contextmanager
    def _run(self) -> Iterator[subprocess.Popen[bytes]]:
        """A run of the sweep; whatever happens, nothing of it goes on afterwards."""
        with (self.workspace.path / "snakemake.log").open("wb") as log:
            process = subprocess.Popen(
                self.workspace.command(*OPTIONS, *TARGETS),
                cwd=self.workspace.path,
                env=self.workspace.env,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            for number in self.run("squeue", "-h", "-o", "%i").split():
                self.run("scancel", number)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        assert process.wait(LIMIT_S) == 1, self._said()
        results = self.workspace.path / "results"
        files = frozenset(str(path.relative_to(results)) for path in results.rglob("*") if path.is_file())
        errors = {path.stem: read_verdict(path) for path in results.glob("errors/*.json")}
        self.runs.append(Left(self._said(), errors, files))
        logs = self.workspace.path / "logs"
        for what, job in self.jobs.items():
            if not job.log:
                self.jobs[what] = replace(
                    job,
                    log=(logs / f"generate/{job.config}/0.log").read_text(),
                    slurm_log=(logs / f"slurm/rule_generate/{job.config}_0/{job.number}.log").read_text(),
                )

    def _said(self) -> str:
        return (self.workspace.path / "snakemake.log").read_text()

    def _state(self, job: Job) -> str:
        return self.run("squeue", "-h", "-j", job.number, "-t", "all", "-o", "%T").strip()

    def _catch(self, configs: set[str]) -> list[Job]:
        """The jobs that serve configs, all of them at one moment, while their servers answer."""
        jobs: dict[str, Job] = {}

        def caught() -> bool:
            for config in configs - jobs.keys():
                if job := self._stand_still(config):
                    jobs[config] = job
            return jobs.keys() == configs

        assert wait_until(caught, LIMIT_S), self._said()
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return [replace(job, held=replace(job.held, until=now)) for job in jobs.values()]

    def _stand_still(self, config: str) -> Job | None:
        """Stop the script that serves a config as soon as its server answers; None before that."""
        served = self.workspace.path / f"results/outputs/{config}/0.server.log"
        if not served.exists() or "/v1/" not in served.read_text():
            return None
        (server,) = (one for one in self._processes() if is_server(one) and writes(one) == served)
        env = server.environ()
        for process in self._processes(env["SLURM_JOB_ID"]):
            if ".snakemake/scripts" in " ".join(process.cmdline()):
                process.suspend()
        held = Held(env["SLURMD_NODENAME"], frozenset(env[MASK].split(",")), looks(served)[0], "")
        return Job(config, env["SLURM_JOB_ID"], held)

    def _processes(self, number: str | None = None) -> list[psutil.Process]:
        """What lives of SLURM jobs of this workspace, or of one: Snakemake, scripts, servers, watchdogs."""
        found = []
        for process in psutil.process_iter():
            try:
                job = process.environ().get("SLURM_JOB_ID")
                if job and number in (None, job) and process.cwd() == str(self.workspace.path):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _gone(self, what: str, job: Job) -> None:
        """Wait for the end of a job, and keep what is left of it."""
        wait_until(lambda: not self._processes(job.number), 2 * GONE_S, LOOK_S)
        left = tuple(" ".join(process.cmdline()) for process in self._processes(job.number))
        self.jobs[what] = replace(job, processes=left)

    def _preempt(self, node: str, count: int) -> None:
        """A job of others, that goes first, wants devices of a node."""
        options = ["-p", "first", "-w", node, f"--gres=gpu:toy:{count}", "--mem=100", "-o", "/dev/null"]
        self.run("sbatch", *options, "--wrap", "sleep 1")


def is_server(process: psutil.Process) -> bool:
    """Whether a process is a server and not the watchdog that has its command line."""
    line = " ".join(process.cmdline())
    return "assay.embedded" in line and "watchdog" not in line


def writes(process: psutil.Process) -> Path:
    """The file that a process prints to."""
    return Path(f"/proc/{process.pid}/fd/1").readlink()


def looks(beside: Path) -> list[str]:
    """When the devices of an instance were looked at, in UTC."""
    return [json.loads(line)["utc"] for line in beside.with_name("0.devices.jsonl").read_text().splitlines()]


def evidence(workspace: SlurmWorkspace) -> list[Held]:
    """Of each instance that was served: what it held and for how long, by what it left."""
    found = []
    for path in sorted((workspace.path / "results/outputs").glob("*/0.identity.json")):
        identity = json.loads(path.read_text())
        devices = frozenset(device["uuid"] for device in identity["devices"]["leased"])
        found.append(Held(identity["slurm"]["node"], devices, looks(path)[0], looks(path)[-1]))
    return found
