"""Containers without an engine: a server run by Apptainer's command, for sites where nobody may use Docker (SLURM).

Apptainer runs the server as our own child, in our own limits, groups and network: what an engine would have to be asked
for (`shm_bytes`, `ulimits`, `group_add`, `ipc_host`, `host_network`, `cap_add`, `security_opt`) is as the caller's, and
lifetime and proof of absence are the process launcher's. Options: https://apptainer.org/docs/user/latest/cli.html
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from assay.engines import images
from assay.engines.container import ContainerLaunch, check_paths, host_path
from assay.engines.process import ProcessLaunch, ProcessServer
from assay.errors import ConfigError
from assay.records import FailureKind

COMMAND = "apptainer"
FETCH_LIMIT_S = 3600  # an image of tens of GB is fetched and converted once

_INTO_CONTAINER = "APPTAINERENV_"  # variables with this prefix are set in the container, however it is cleaned
_NOT_OURS = (_INTO_CONTAINER, "SINGULARITYENV_", "APPTAINER_BIND", "SINGULARITY_BIND")


def apptainer_command(launch: ContainerLaunch, argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` in the image of a launch, with its mounts and devices and nothing else of ours.

    Raises:
        ConfigError: the launch asks for what Apptainer cannot give, or has no image.
    """
    if launch.user is not None:
        raise ConfigError(f"config {launch.config}: user '{launch.user}': Apptainer runs as its caller; set no user")
    binds = [f"{_plain(m.source)}:{_plain(m.target)}:{'ro' if m.read_only else 'rw'}" for m in launch.mounts]
    options = [word for bind in (*binds, *map(_plain, launch.devices)) for word in ("--bind", bind)]
    if launch.gpus:
        options += ["--nv"]
    if launch.workdir is not None:
        options += ["--pwd", launch.workdir]
    if launch.memory_bytes is not None:
        options += ["--memory", str(launch.memory_bytes)]
    if launch.pids_limit is not None:
        options += ["--pids-limit", str(launch.pids_limit)]
    image = f"docker://{images.reference(launch.repository, launch.digest, launch.tag)}"
    return [COMMAND, "exec", "--containall", "--cleanenv", *options, image, *argv]


def apptainer_environment(launch: ContainerLaunch, base: Mapping[str, str]) -> dict[str, str]:
    """The environment to run Apptainer in: `base`, with what the server shall see and nothing else that it would.

    `launch.env` holds the mask that chooses among the GPUs: Apptainer shows all of them.
    """
    kept = {key: value for key, value in base.items() if not key.startswith(_NOT_OURS)}
    return kept | {f"{_INTO_CONTAINER}{key}": value for key, value in launch.env.items()}


def process_launch(launch: ContainerLaunch, base: Mapping[str, str]) -> ProcessLaunch:
    """The process that runs the server of a launch. The server shares the machine's network: `{port}` stays open."""
    argv = [word.replace("{host}", launch.host) for word in launch.argv]
    return ProcessLaunch(
        argv=tuple(apptainer_command(launch, argv)),
        env=apptainer_environment(launch, base),
        host=launch.host,
        start_limit_s=launch.start_limit_s,
        stop_grace_s=launch.stop_grace_s,
    )


class ApptainerServer(ProcessServer):
    """A server under Apptainer. `pid` is Apptainer's first process: arguments and variables are those we gave it."""

    def __init__(self, launch: ContainerLaunch, port: int, log_path: Path) -> None:
        self._container_launch = launch
        super().__init__(process_launch(launch, os.environ), port, log_path)

    def interpreter(self) -> str:
        """The Python that is called in the container."""
        called = self._container_launch.argv[0]
        return called if PurePosixPath(called).name.startswith("python") else "python3"

    def output_of(self, command: Sequence[str], env: Mapping[str, str]) -> str | None:
        """What a command prints in another container of the same image, mounts and environment."""
        return super().output_of(apptainer_command(self._container_launch, command), env)

    def on_host(self, file: str) -> str | None:
        """Where a file of the container lies on this machine: in a mount, or in the image (None)."""
        return host_path(self._container_launch.mounts, file)

    def _start(self) -> None:
        launch = self._container_launch
        check_paths(launch)
        if shutil.which(COMMAND, path=self.launch.env.get("PATH")) is None:
            self._fail(FailureKind.ENGINE_UNREACHABLE, f"{COMMAND} is not on PATH; load its module, or install it")
        # Fetched first, under a limit of its own: the start limit is for the server.
        command = apptainer_command(launch, ["true"])
        try:
            done = subprocess.run(
                command, env=dict(self.launch.env), capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            self._fail(FailureKind.IMAGE_MISSING, f"image {launch.reference} was not there within {FETCH_LIMIT_S} s")
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
            self._fail(FailureKind.IMAGE_MISSING, f"image {launch.reference} cannot be run by {COMMAND}: {last}")
        super()._start()


def _plain(path: str) -> str:
    """`path`, if it can be part of a --bind option."""
    if "," in path or ":" in path:
        raise ConfigError(f"path '{path}' holds a comma or a colon, which Apptainer's --bind cannot express; rename it")
    return path
