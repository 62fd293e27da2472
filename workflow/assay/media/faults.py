"""What can be wrong with media bytes: the `fault` of a `MediaError`."""

from enum import StrEnum


class Fault(StrEnum):
    """Kinds of bad media, one a response: the first that is found."""

    EMPTY = "empty"  # no bytes at all
    NO_SAMPLES = "no_samples"  # a header and nothing behind it
    NOT_MEDIA = "not_media"  # JSON, HTML, base64 text, or bytes that nobody knows
    WRONG_CONTAINER = "wrong_container"  # media, but of another kind than declared
    UNSUPPORTED = "unsupported"  # a container or an encoding that is not read here
    MALFORMED = "malformed"  # its decoder gives up
    TRUNCATED = "truncated"  # less than the header declares
    LENGTH_MISMATCH = "length_mismatch"  # more than the header declares
    PARTIAL_FRAME = "partial_frame"  # half a sample at the end
    CONCATENATED = "concatenated"  # several files in a row
    WRONG_RATE = "wrong_rate"
    WRONG_CHANNELS = "wrong_channels"
    NONFINITE = "nonfinite"  # NaN or infinite samples
