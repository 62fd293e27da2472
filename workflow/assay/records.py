"""The typed rows that pass between stages, and their Arrow schemas.

One schema per table, one file per stage and key. Rows join on their keys (`item_id`, `arm`, `pos`, `metric`),
never on position. Every table of every modality uses the same `responses` and `scores` schemas; a modality adds
only its own judged table (text: `TOKENS`).
"""

from __future__ import annotations

import json
from enum import StrEnum

import pyarrow as pa


class Evidence(StrEnum):
    """How much a response proves about the tokens that were sampled."""

    E0 = "E0"  # prompt ids, output ids, chosen and top-k logprobs
    E1 = "E1"  # output ids
    E2 = "E2"  # text that encodes and decodes to itself, and a finish reason
    E3 = "E3"  # parsed or lossy text
    NONE = "none"  # nothing usable came back


class ResponseStatus(StrEnum):
    """What became of one planned request. Only `OK` is scored; everything else is a worst-case item."""

    OK = "ok"
    HTTP_ERROR = "http_error"
    TIMEOUT = "timeout"
    TRANSPORT_ERROR = "transport_error"
    STREAM_ERROR = "stream_error"  # an error sent in-band after HTTP 200, or a stream that stopped short
    EMPTY = "empty"
    MALFORMED = "malformed"  # HTTP 200 whose body is not what the protocol says
    NONFINITE = "nonfinite"  # NaN or infinite logprobs or values
    NOT_SENT = "not_sent"  # the server was gone, or never came


class FailureKind(StrEnum):
    """Why a server never became ready."""

    CANNOT_START = "cannot_start"  # no such program, mount or device, or it may not be run
    EXITED = "exited"
    DEVICES_UNFIT = "devices_unfit"  # its devices cannot be told, are not free, or not fit to measure on
    OUT_OF_MEMORY = "out_of_memory"  # the kernel ended it, or a process of it, at its memory limit
    NOT_READY = "not_ready"  # no generation within the start limit
    PORT_TAKEN = "port_taken"  # somebody else answers on the port
    ENGINE_UNREACHABLE = "engine_unreachable"  # the container engine does not answer, or is not on this machine
    IMAGE_MISSING = "image_missing"  # neither the engine nor the registry has it
    IMAGE_MISMATCH = "image_mismatch"  # what came, or runs, is not what is pinned


class Status(StrEnum):
    """Status of a gate and of a verdict, worst first."""

    FAIL = "FAIL"
    ERROR = "ERROR"
    INCONCLUSIVE = "INCONCLUSIVE"
    UNSUPPORTED = "UNSUPPORTED"
    PASS_WITH_CAVEAT = "PASS_WITH_CAVEAT"
    PASS = "PASS"
    SKIPPED_OPTIONAL = "SKIPPED_OPTIONAL"  # gates only


EXIT_CODES = {
    Status.PASS: 0,
    Status.PASS_WITH_CAVEAT: 0,
    Status.FAIL: 1,
    Status.ERROR: 2,
    Status.INCONCLUSIVE: 3,
    Status.UNSUPPORTED: 4,
}


class Flag(StrEnum):
    """Why a score is what it is."""

    OK = "ok"
    UNDEFINED = "undefined"  # value is null
    NONFINITE = "nonfinite"  # value is null
    MISSING_AS_WORST = "missing_as_worst"  # no scorable response: counted as the worst case


_dictionary = pa.dictionary(pa.int32(), pa.string())
_ids = pa.list_(pa.int32())
_logprobs = pa.list_(pa.float32())

# A media file as Hugging Face `datasets` stores and plays it
# (https://huggingface.co/docs/datasets/about_dataset_features): the file's own bytes, and a name for its format.
MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

SEGMENTS = pa.list_(pa.struct([("start", pa.float64()), ("end", pa.float64()), ("text", pa.string())]))  # times in s


def media_features(**columns: str) -> dict[bytes, bytes]:
    """Schema metadata that tells `datasets` which columns of type `MEDIA` hold what: column -> "Audio" or "Image"."""
    features = {column: {"_type": feature} for column, feature in columns.items()}
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


ITEMS = pa.schema(
    [
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("set_id", _dictionary, nullable=False),
        pa.field("modality", _dictionary, nullable=False),
        pa.field("kind", _dictionary, nullable=False),  # chat | completion | needle | transcription | speech
        pa.field("tags", pa.list_(pa.string()), nullable=False),
        # Canonical JSON (RFC 8785): {"messages": [...]} or {"prompt": "..."}, and max_tokens, temperature, top_p, seed.
        # A transcription's is {"file", "language", "temperature"}, where the file is `audio`; speech's is {"input"}.
        pa.field("request", pa.large_string(), nullable=False),
        # Exact answer (needles), or what is said in the audio sent or asked for ("": nothing is said), else null
        pa.field("expected", pa.string()),
        pa.field("prompt_tokens_ref", pa.int32()),  # by the set's sizing tokenizer, template included; text only
        pa.field("prompt_sha256", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),  # source id and key of what the item was made from
        pa.field("audio", MEDIA),  # the file to send, or null
    ],
    metadata=media_features(audio="Audio"),
)

RESPONSES = pa.schema(
    [
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("set_id", _dictionary, nullable=False),
        pa.field("arm", _dictionary, nullable=False),  # served_<instance>_<pass> | judge | <dtype>-<change>
        pa.field("status", _dictionary, nullable=False),  # ResponseStatus
        pa.field("http_code", pa.int16()),
        pa.field("finish_reason", _dictionary),
        pa.field("evidence", _dictionary, nullable=False),  # Evidence
        pa.field("t_start_utc", pa.timestamp("us", tz="UTC")),
        pa.field("latency_ms", pa.float64()),
        pa.field("ttft_ms", pa.float64()),  # time to first token or audio, streamed requests only
        pa.field("concurrency", pa.int16()),
        pa.field("attempts", pa.int8(), nullable=False),
        pa.field("prompt_tokens", pa.int32()),  # as the server counted them
        pa.field("output_tokens", pa.int32()),
        pa.field("text", pa.large_string()),
        pa.field("prompt_token_ids", _ids),
        pa.field("token_ids", _ids),
        pa.field("token_logprobs", _logprobs),  # nat, of the chosen tokens
        pa.field("top_token_ids", pa.list_(_ids)),
        pa.field("top_logprobs", pa.list_(_logprobs)),  # nat, descending
        pa.field("audio", MEDIA),  # speech: the body as served; path = a name with its format's suffix
        pa.field("chunk_bytes", pa.list_(pa.int32())),  # sizes of the body's chunks as they came, streamed only ...
        pa.field("chunk_ms", pa.list_(pa.float64())),  # ... and when each came, since the request was sent
        pa.field("language", pa.string()),  # transcription: as the server says
        pa.field("segments", SEGMENTS),  # transcription: as the server says
        pa.field("output_sha256", pa.string()),
        pa.field("error", pa.string()),  # also of a first attempt, where the second was answered
    ],
    metadata=media_features(audio="Audio"),
)

TOKENS = pa.schema(
    [
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("set_id", _dictionary, nullable=False),
        pa.field("arm", _dictionary, nullable=False),
        # "ids": the ids as sampled; "text": the ids that the decoded text encodes to (evidence E2 and its floor)
        pa.field("path", _dictionary, nullable=False),
        pa.field("pos", pa.int32(), nullable=False),
        pa.field("token_id", pa.int32(), nullable=False),
        pa.field("is_special", pa.bool_(), nullable=False),
        pa.field("lp_served", pa.float32()),  # nat, as the server reported it
        pa.field("lp_judge", pa.float32(), nullable=False),  # nat, raw (temperature 1)
        pa.field("lp_judge_max", pa.float32(), nullable=False),  # nat, of the judge's own first choice
        pa.field("judge_rank", pa.int32(), nullable=False),  # 1 = the judge's first choice
        pa.field("entropy", pa.float32(), nullable=False),  # nat, of the distribution that was asked for
        pa.field("variance", pa.float32(), nullable=False),  # nat^2, of the surprisal under that distribution
        pa.field("lp_asked", pa.float32(), nullable=False),  # nat, under that distribution; -inf outside its support
        pa.field("in_support", pa.bool_(), nullable=False),
        pa.field("judge_top_ids", _ids, nullable=False),  # 20
        pa.field("judge_top_lp", _logprobs, nullable=False),  # nat
        pa.field("served_top_lp", _logprobs),  # nat, the server's top-k ...
        pa.field("served_top_lp_judge", _logprobs),  # ... and the judge's for the same ids
    ]
)

TRANSCRIPTS = pa.schema(
    [
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("set_id", _dictionary, nullable=False),
        pa.field("arm", _dictionary, nullable=False),  # as in the responses, or control_<fault>
        # What is wrong with the bytes (media.faults.Fault), and in words: null where they were decoded. A request
        # without an answer has `error` alone. All that follows is null where it is not known.
        pa.field("fault", _dictionary),
        pa.field("error", pa.string()),
        pa.field("format", _dictionary),  # as declared: the suffix of the file's name
        pa.field("headers", pa.int16()),  # beginnings of audio files in the bytes, wherever
        pa.field("container", _dictionary),  # null: raw samples
        pa.field("codec", _dictionary),
        pa.field("rate", pa.int32()),  # Hz, as the file says
        pa.field("channels", pa.int16()),
        pa.field("samples", pa.int64()),  # of one channel, counted
        pa.field("samples_declared", pa.int64()),  # by the header; null where it leaves the length open
        pa.field("byte_rate_agrees", pa.bool_()),  # with the rate, as that of a patched header doesn't
        pa.field("duration_s", pa.float64()),
        pa.field("pcm_sha256", pa.string()),  # of samples, rate and channels: equal ones are one audio
        # Levels: FS is full scale 1; silence is below metrics.audio.SILENCE_DBFS
        pa.field("level_dbfs", pa.float64()),  # RMS without the mean; null: silent throughout
        pa.field("peak", pa.float64()),  # FS
        pa.field("dc", pa.float64()),  # FS
        pa.field("clip_fraction", pa.float64()),
        pa.field("silence_fraction", pa.float64()),
        pa.field("lead_s", pa.float64()),  # silence before the first sound
        pa.field("trail_s", pa.float64()),
        pa.field("sound_s", pa.float64()),
        pa.field("bandwidth_hz", pa.float64()),  # of 99 % of the power
        pa.field("centroid_hz", pa.float64()),
        pa.field("flatness", pa.float64()),
        pa.field("repeat", pa.float64()),  # correlation of the level with itself at a lag, the highest
        pa.field("repeat_lag_s", pa.float64()),
        pa.field("gaps", pa.int32()),  # zeros that cut into sound
        pa.field("clicks", pa.int32()),
        # Chunk seams of a streamed body: index of each first sample, share of places that click as loud, and whether
        # what follows repeats what went before
        pa.field("seams", pa.list_(pa.int64())),
        pa.field("seam_ranks", pa.list_(pa.float64())),
        pa.field("seam_repeats", pa.list_(pa.float64())),
        # What the pinned Whisper hears; it is asked only where there may be speech, else the text is empty
        pa.field("has_speech", pa.bool_()),
        pa.field("text", pa.large_string()),
        pa.field("no_speech_prob", pa.float64()),
        # With times [s] in the judge's own rows; else empty
        pa.field("words", pa.list_(pa.struct([("text", pa.string()), ("start", pa.float64()), ("end", pa.float64())]))),
        # Whose voice it is, a vector of length 1 (references.speaker); empty: nobody's; null: nobody asked
        pa.field("speaker_embedding", pa.list_(pa.float32())),
    ]
)

SCORES = pa.schema(
    [
        pa.field("config", _dictionary, nullable=False),
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("set_id", _dictionary, nullable=False),
        pa.field("arm", _dictionary, nullable=False),  # served_* | judge | <dtype>-<change> | control_<fault>
        pa.field("metric", _dictionary, nullable=False),
        pa.field("value", pa.float64()),
        pa.field("flag", _dictionary, nullable=False),  # Flag
        pa.field("unit", _dictionary, nullable=False),  # nat | dB | pp | fraction | count | bool | token | ...
        pa.field("direction", pa.int8(), nullable=False),  # +1 higher is better, -1 lower is better, 0 neither
        pa.field("aux", pa.map_(pa.string(), pa.float64())),
    ]
)

FLOOR = pa.schema(
    [
        pa.field("gate", _dictionary, nullable=False),
        pa.field("metric", _dictionary, nullable=False),
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("arm", _dictionary, nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)

JUDGE = "judge"  # the reference arm that scores; it also answers every item itself
SERVED = "served_"  # how the arms of a server's passes begin


def served_arm(instance: int, name: str) -> str:
    """The arm of pass `name` of a server instance."""
    return f"{SERVED}{instance}_{name}"


def pass_of(arm: str) -> str:
    """The name of the pass whose arm this is."""
    return arm.split("_", 2)[-1]


SCHEMAS = {
    "items": ITEMS,
    "responses": RESPONSES,
    "tokens": TOKENS,
    "transcripts": TRANSCRIPTS,
    "scores": SCORES,
    "floor": FLOOR,
}
SORT_KEYS = {
    "items": ["item_id"],
    "responses": ["item_id", "arm"],
    "tokens": ["item_id", "arm", "path", "pos"],
    "transcripts": ["item_id", "arm"],
    "scores": ["item_id", "arm", "metric"],
    "floor": ["gate", "item_id", "arm"],
}
