"""A SLURM cluster of the tests' own: a controller and two nodes with two GPUs each, all of it on this machine.

Daemons, keys, sockets and state lie in one folder. The GPUs are device nodes that nothing answers behind: SLURM counts
and masks them as it does real ones.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

REQUIRED = "REQUIRE_SLURM"  # set where they must run
UP_LIMIT_S, DOWN_LIMIT_S = 60, 20
NODES = ("n1", "n2")
GPUS = 2  # of a node
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo", "sacct", "sacctmgr")
# A job is lost with its node 15 s after the node fell silent; elsewhere that is minutes. SLURM itself ends only what is
# in a job's process group. A server is not, so nothing but its keeper stops it; on a cluster, control groups would too.
CONF = """\
ClusterName=assay
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
PluginDir={plugins}
StateSaveLocation={root}/state
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmdSpoolDir={root}/spool/%n
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
SlurmdTimeout=15
KillWait=10
ReturnToService=2
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=200
MinJobAge=600
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
PARTITIONS = """\
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=first Nodes=ALL MaxTime=INFINITE PriorityTier=2
"""


def give_up(missing: str) -> NoReturn:
    """Skip, or fail where SLURM must be."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set and there is no SLURM: {missing}")
    pytest.skip(f"no SLURM can be started here: {missing}")


def why_not(folder: Path) -> str | None:
    """Why no cluster can be started from what is unpacked in `folder`."""
    if os.geteuid() != 0:
        return "it needs root"
    if not (folder / "complete").is_file():
        return f"get it with tests/slurm/fetch_slurm.sh {folder} PYTHON"
    return None


class PrivateSlurm:
    """The cluster. As a context: started, and on the way out stopped and proven gone."""

    def __init__(self, folder: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="assay-slurm-"))
        self._folder = folder
        self._libraries = folder / "usr/lib/x86_64-linux-gnu"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        """What Snakemake needs to find the cluster's commands and its plugin for SLURM."""
        paths = {"PATH": [str(self.root / "bin")], "PYTHONPATH": [str(self._folder / "python")]}
        return {name: os.pathsep.join([*new, *filter(None, [os.environ.get(name)])]) for name, new in paths.items()}

    def __enter__(self) -> PrivateSlurm:
        try:
            self._write()
            self._start("munged", *self._munged())
            self._wait((self.root / "munge.socket").exists, "munged")
            self._start("slurmctld", self.root / "bin/slurmctld", "-D", "-f", self.root / "slurm.conf")
            for node in NODES:
                self.start_node(node)
            self.wait_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._daemons.values():
            process.send_signal(signal.SIGTERM)
        for process in self._daemons.values():
            try:
                process.wait(DOWN_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _, left = psutil.wait_procs(self.processes(), timeout=DOWN_LIMIT_S)  # what was just cancelled takes a moment
        for process in left:
            process.kill()
        shutil.rmtree(self.root)
        assert not left, f"the test cluster left behind: {left}"

    def processes(self, node: str | None = None) -> set[psutil.Process]:
        """What came of this cluster and lives: all of it, or what jobs run on one node."""
        jobs, others = set(), set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                if process.pid == os.getpid() or environ.get("SLURM_CONF") != f"{self.root}/slurm.conf":
                    continue
                (jobs if "SLURMD_NODENAME" in environ else others).add(process)
                if node not in (None, environ.get("SLURMD_NODENAME")):
                    jobs.discard(process)
        # The keeper of a step hides its environment; it is the parent of the step's first process.
        keepers = {keeper for process in jobs if (keeper := _parent(process)) and keeper.name() == "slurmstepd"}
        return keepers | jobs | (others if node is None else set())

    def run(self, *command: str) -> str:
        """What one of SLURM's commands prints."""
        done = subprocess.run(
            [self.root / "bin" / command[0], *command[1:]], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        options = ["-D", "-N", node, "-f", self.root / "slurm.conf", "-d", self.root / "bin/slurmstepd"]
        self._start(node, self.root / "bin/slurmd", *options)

    def kill_node(self, node: str) -> None:
        """What a power cut does: the daemon and every process on the node are gone at once, and nobody is told."""
        daemon = self._daemons.pop(node)
        lost = self.processes(node)
        for process in lost:
            process.suspend()  # or the keepers tell that their steps were killed
        daemon.kill()
        daemon.wait()
        for process in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def wait_idle(self) -> None:
        """Until every node takes jobs."""
        self._wait(lambda: self._idle() == set(NODES), "slurmctld and its nodes")

    def _idle(self) -> set[str]:
        done = subprocess.run(
            [self.root / "bin/sinfo", "-h", "-N", "-t", "idle", "-o", "%N"],
            capture_output=True,
            text=True,
            check=False,
        )
        return set(done.stdout.split())

    def _start(self, name: str, *command: object) -> None:
        with (self.root / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                # A test run that is killed takes its cluster with it.
                ["setpriv", "--pdeathsig", "TERM", *map(str, command)],
                env={**os.environ, "LD_LIBRARY_PATH": self._library_path, "SLURM_CONF": str(self.root / "slurm.conf")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _wait(self, condition, what: str) -> None:
        deadline = time.monotonic() + UP_LIMIT_S
        while not condition():
            ended = [name for name, process in self._daemons.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = {path.name: path.read_text()[-600:] for path in self.root.glob("*.[lo][ou][gt]")}
                raise RuntimeError(f"{what} does not come up (ended: {ended}): {logs}")
            time.sleep(0.05)

    @property
    def _library_path(self) -> str:
        return f"{self._libraries}:{self._libraries}/slurm-wlm"

    def _munged(self) -> list[object]:
        key = self.root / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "seed"}
        options = [f"--{option}={self.root / file}" for option, file in files.items()]
        return [
            self._folder / "usr/sbin/munged",
            "--foreground",
            "--force",
            f"--log-file={self.root}/munged.log",
            *options,
        ]

    def _write(self) -> None:
        host = socket.gethostname().split(".")[0]
        ports = _free_ports(1 + len(NODES))
        for folder in ("state", "spool", "bin", "gpu"):
            (self.root / folder).mkdir()
        conf = CONF.format(host=host, port=ports[0], root=self.root, plugins=self._libraries / "slurm-wlm")
        gres = ""
        for node, port in zip(NODES, ports[1:], strict=True):
            (self.root / "spool" / node).mkdir()
            conf += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=64000 "
                f"Gres=gpu:toy:{GPUS}\n"
            )
            for number in range(GPUS):  # regular files are refused, and then there is no mask
                os.mknod(self.root / f"gpu/{node}-{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
            files = f"{self.root}/gpu/{node}-[0-{GPUS - 1}]"
            gres += f"NodeName={node} Name=gpu Type=toy Flags=amd_gpu_env File={files}\n"
        (self.root / "slurm.conf").write_text(conf + PARTITIONS)
        (self.root / "gres.conf").write_text(gres)
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for daemon in ("slurmctld", "slurmd", "slurmstepd"):  # they go by their name for what they are
            (self.root / "bin" / daemon).symlink_to(self._folder / f"usr/sbin/{daemon}-wlm")
        for command in COMMANDS:  # jobs lose SLURM_CONF on their way, so the commands bring it
            script = self.root / "bin" / command
            script.write_text(
                f"#!/bin/sh\nexport SLURM_CONF={self.root}/slurm.conf LD_LIBRARY_PATH={self._library_path}\n"
                f'exec {self._folder}/usr/bin/{command} "$@"\n'
            )
            script.chmod(0o755)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _parent(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.Error:
        return None
