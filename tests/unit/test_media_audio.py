"""Served audio bytes: every bad one is refused for its own reason, beside a clean twin that is read."""

import base64
import io
import struct

import numpy as np
import pytest
import soundfile
from sounds import tone, voice

from assay.errors import AssayError, MediaError
from assay.media.audio import (
    Container,
    Pcm,
    chunk_starts,
    count_headers,
    decode,
    decode_named,
    decode_pcm,
    encode_wav,
    resample,
)
from assay.media.faults import Fault
from assay.metrics.audio import float_to_int16, int16_to_float, lag

RATE = 24_000
VOICE = voice(1.0)
DATA = 36  # byte of a plain WAV where the data chunk begins: its name, its size, then samples


def file(container, encoding=None, samples=VOICE, rate=RATE):
    buffer = io.BytesIO()
    soundfile.write(buffer, np.atleast_2d(samples).T, rate, format=container, subtype=encoding)
    return buffer.getvalue()


WAV = encode_wav(VOICE, RATE)
FLAC, MP3, OPUS = file("FLAC"), file("MP3"), file("OGG", "OPUS")


def sized(wav, size):
    """The WAV with another size of samples in its header."""
    return wav[: DATA + 4] + struct.pack("<I", size) + wav[DATA + 8 :]


def refused(fault, message, read, *arguments, **options):
    with pytest.raises(MediaError, match=message) as caught:
        read(*arguments, **options)
    assert caught.value.fault is fault
    assert isinstance(caught.value, AssayError)


# --- what is read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "bits", "step"),
    [("PCM_U8", 8, 2**-7), ("PCM_16", 16, 2**-15), ("PCM_24", 24, 2**-23), ("PCM_32", 32, 2**-24), ("FLOAT", 32, 0),
     ("DOUBLE", 64, 0), ("ULAW", 8, 0.02), ("ALAW", 8, 0.02)],
)  # fmt: skip
def test_wav_is_read_in_every_encoding_to_its_last_bit(encoding, bits, step):
    audio = decode(file("WAV", encoding), Container.WAV)
    assert (audio.rate, audio.codec, audio.container) == (RATE, encoding, Container.WAV)
    assert (audio.header.frames, audio.header.bits, audio.header.byte_rate_agrees) == (RATE, bits, True)
    assert audio.samples.shape == (1, RATE) and audio.samples.dtype == np.float32
    assert np.abs(audio.samples[0] - VOICE).max() <= step
    assert audio.duration_s == 1.0


@pytest.mark.parametrize("container", ["WAV", "WAVEX"])
def test_channels_stay_apart_and_in_order(container):
    audio = decode(file(container, "PCM_16", np.stack([VOICE, -VOICE])), Container.WAV, rate=RATE, channels=2)
    assert audio.samples.shape == (2, RATE)
    assert np.abs(audio.samples[0] - VOICE).max() < 2**-14
    assert np.abs(audio.samples[1] + VOICE).max() < 2**-14


@pytest.mark.parametrize(
    ("content", "container", "codec", "frames"),
    [(FLAC, Container.FLAC, "flac", RATE), (MP3, Container.MP3, "mp3", None), (OPUS, Container.OGG, "opus", RATE),
     (file("FLAC", "PCM_24"), Container.FLAC, "flac", RATE), (file("OGG", "VORBIS"), Container.OGG, "vorbis", RATE)],
)  # fmt: skip
def test_coded_files_are_read_whole_and_without_delay(content, container, codec, frames):
    audio = decode(content, container, rate=RATE, channels=1)
    assert (audio.rate, audio.codec, audio.header.frames) == (RATE, codec, frames)
    assert audio.samples.shape == (1, RATE) and audio.samples.dtype == np.float32
    assert abs(lag(VOICE, audio.samples[0])) <= 1
    assert np.corrcoef(audio.samples[0], VOICE)[0, 1] > 0.9


@pytest.mark.parametrize("encoding", ["PCM_16", "PCM_24"])
def test_flac_keeps_every_bit_and_channel(encoding):
    flac = file("FLAC", encoding, np.stack([VOICE, -0.5 * VOICE]))
    other, _ = soundfile.read(io.BytesIO(flac), dtype="float32")
    assert np.array_equal(decode(flac, Container.FLAC).samples, other.T)


def test_a_flac_whose_header_leaves_the_length_open_is_read_whole():
    streamed = bytearray(FLAC)  # the count of samples in STREAMINFO: the 36 bits before its hash
    streamed[21] &= 0xF0
    streamed[22:26] = bytes(4)
    audio = decode(bytes(streamed), Container.FLAC)
    assert audio.header.frames is None
    assert np.array_equal(audio.samples, decode(FLAC, Container.FLAC).samples)


def test_an_mp3_without_a_frame_that_counts_is_read_whole():
    tag = MP3.index(b"Xing")
    counted = decode(MP3, Container.MP3).samples[0]
    uncounted = decode(MP3[:tag] + bytes(4) + MP3[tag + 4 :], Container.MP3).samples[0]
    delay = lag(counted, uncounted)
    assert 0 < delay < 3000 and len(uncounted) >= RATE + delay - 1  # nothing tells how much silence to take off
    assert np.corrcoef(counted[: RATE - 10], uncounted[delay : delay + RATE - 10])[0, 1] > 0.99


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0xFFFFFFFF - 36, 0x7FFFFFFF, 0])
def test_a_streamed_header_is_believed_in_all_but_its_size(size):
    audio = decode(sized(WAV, size), Container.WAV, rate=RATE)
    assert audio.header.frames is None
    assert np.array_equal(audio.samples, decode(WAV, Container.WAV).samples)


def test_chunks_before_and_after_the_samples_are_no_samples():
    note = b"LIST" + struct.pack("<I", 3) + b"abc\0"  # odd chunks are padded
    tagged = WAV[:DATA] + note + WAV[DATA:] + note
    assert np.array_equal(decode(tagged, Container.WAV).samples, decode(WAV, Container.WAV).samples)


def test_raw_samples_are_read_as_the_request_declared_them():
    content = WAV[DATA + 8 :]
    audio = decode_pcm(content, Pcm(RATE))
    assert np.array_equal(audio.samples, decode(WAV, Container.WAV).samples)
    assert (audio.container, audio.codec, audio.header.frames) == (None, "PCM_16", None)
    assert decode_pcm(content, Pcm(48_000, channels=2)).samples.shape == (2, RATE // 2)
    assert decode_pcm(VOICE.tobytes(), Pcm(RATE, encoding="FLOAT")).samples.tolist() == [VOICE.tolist()]


def test_raw_samples_may_begin_like_a_frame_of_mp3():
    assert decode_pcm(b"\xff\xfb" + bytes(10), Pcm(RATE)).samples[0, 0] == -1025 / 32768


def test_a_rate_patched_in_the_header_leaves_the_old_byte_rate():
    patched = WAV[:24] + struct.pack("<I", 16_000) + WAV[28:]
    assert decode(patched, Container.WAV).header.byte_rate_agrees is False


def test_samples_beyond_full_scale_are_kept_for_the_metrics_to_see():
    assert decode(file("WAV", "FLOAT", 3 * VOICE), Container.WAV).samples.max() > 1
    assert decode(encode_wav(3 * VOICE, RATE), Container.WAV).samples.max() < 1  # clipped, not wrapped


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", Container)
def test_an_empty_response_is_refused(container):
    refused(Fault.EMPTY, "no bytes", decode, b"", container)


def test_empty_raw_samples_are_refused():
    refused(Fault.EMPTY, "no bytes", decode_pcm, b"", Pcm(RATE))


@pytest.mark.parametrize(
    ("content", "container"),
    [(encode_wav(VOICE[:0], RATE), Container.WAV), (sized(WAV, 0)[: DATA + 8], Container.WAV),
     (sized(WAV, 0xFFFFFFFF)[: DATA + 8], Container.WAV)],
    ids=["wav", "size 0", "streamed"],
)  # fmt: skip
def test_a_file_without_samples_is_refused(content, container):
    refused(Fault.NO_SAMPLES, "no samples", decode, content, container)


@pytest.mark.parametrize(
    ("content", "container"),
    [(WAV, Container.WAV), (FLAC, Container.FLAC), (MP3, Container.MP3), (OPUS, Container.OGG)],
)
@pytest.mark.parametrize("cut", [0.3, 0.7, -1])
def test_a_truncated_file_is_refused_however_little_is_missing(content, container, cut):
    kept = content[: cut if cut < 0 else round(cut * len(content))]
    refused(Fault.TRUNCATED, r"declares \d+|stops before|cut short", decode, kept, container)


def test_a_flac_file_without_its_last_frame_is_refused_though_every_frame_is_whole():
    kept = FLAC[: FLAC.rindex(b"\xff\xf8")]
    refused(Fault.TRUNCATED, r"declares 24000 samples and \d+ can be decoded", decode, kept, Container.FLAC)


def test_an_ogg_file_without_its_last_page_is_refused_though_every_page_is_whole():
    refused(Fault.TRUNCATED, "stops before", decode, OPUS[: OPUS.rindex(b"OggS")], Container.OGG)


@pytest.mark.parametrize("kept", [12, 20, 30, DATA, DATA + 4])
def test_a_wav_header_cut_short_is_refused(kept):
    refused(Fault.TRUNCATED, f"ends after {kept} bytes", decode, WAV[:kept], Container.WAV)


def test_a_damaged_header_is_refused():
    refused(Fault.TRUNCATED, "flac file is cut short or damaged", decode, FLAC[:6], Container.FLAC)
    refused(Fault.MALFORMED, "Ogg file cannot", decode, OPUS.replace(b"OpusHead", b"OpusHeap"), Container.OGG)
    no_format = WAV[:12] + b"junk" + WAV[16:]
    refused(Fault.MALFORMED, "'fmt '", decode, no_format, Container.WAV)
    no_channels = WAV[:22] + bytes(2) + WAV[24:]
    refused(Fault.MALFORMED, "0 channels at 24000 Hz", decode, no_channels, Container.WAV)


@pytest.mark.parametrize(
    ("rate", "channels"),
    [(1, 1), (999, 1), (1_000_001, 1), (2**31 - 1, 1), (2**31, 1), (2**32 - 1, 1), (RATE, 0), (RATE, 65), (RATE, 1025)],
)
def test_a_header_that_no_audio_has_is_refused_before_its_samples_are_taken_for_days_of_audio(rate, channels):
    fields = struct.pack("<HIIH", channels, rate, 2 * rate * channels & 0xFFFFFFFF, 2 * channels)
    samples = bytes(2 * channels * 100)
    content = WAV[:22] + fields + WAV[34:DATA] + b"data" + struct.pack("<I", len(samples)) + samples
    refused(Fault.MALFORMED, f"{channels} channels at {rate} Hz", decode, content, Container.WAV)


def test_more_samples_than_the_header_declares_are_refused():
    refused(Fault.LENGTH_MISMATCH, "declares 9600 bytes.*38400 more", decode, sized(WAV, 9600), Container.WAV)
    refused(Fault.LENGTH_MISMATCH, "800 more", decode, WAV + bytes(800), Container.WAV)


def test_an_odd_byte_is_refused_wherever_the_length_comes_from():
    refused(Fault.PARTIAL_FRAME, "47999 bytes", decode, sized(WAV, 0xFFFFFFFF)[:-1], Container.WAV)
    refused(Fault.PARTIAL_FRAME, "47999 bytes", decode, sized(WAV, 47_999), Container.WAV)
    refused(Fault.PARTIAL_FRAME, "47999 bytes.*1 too many", decode_pcm, WAV[DATA + 8 : -1], Pcm(RATE))
    refused(Fault.PARTIAL_FRAME, "frames of 4 bytes", decode_pcm, WAV[DATA + 8 : -2], Pcm(RATE, channels=2))


@pytest.mark.parametrize(
    ("joined", "container", "files"),
    [(WAV * 3, Container.WAV, 3), (sized(WAV, 0xFFFFFFFF) * 2, Container.WAV, 2), (FLAC * 2, Container.FLAC, 2),
     (MP3 * 3, Container.MP3, 3), (OPUS * 2, Container.OGG, 2)],
    ids=["wav", "streamed wav", "flac", "mp3", "opus"],
)  # fmt: skip
def test_chunks_sent_as_files_of_their_own_are_counted(joined, container, files):
    refused(Fault.CONCATENATED, f"{files} ", decode, joined, container)


def test_another_rate_or_number_of_channels_than_the_model_makes_is_refused():
    assert decode(WAV, Container.WAV, rate=RATE, channels=1).rate == RATE
    refused(Fault.WRONG_RATE, "says 24000 Hz, the model makes 16000 Hz", decode, WAV, Container.WAV, rate=16_000)
    refused(Fault.WRONG_CHANNELS, "says 1 channels, the model makes 2", decode, WAV, Container.WAV, channels=2)
    refused(Fault.WRONG_RATE, "says 24000 Hz", decode, OPUS, Container.OGG, rate=48_000)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(bad):
    damaged = VOICE.copy()
    damaged[[5, 9]] = bad
    refused(Fault.NONFINITE, "2 of 24000", decode, file("WAV", "FLOAT", damaged), Container.WAV)
    refused(Fault.NONFINITE, "2 of 24000", decode_pcm, damaged.tobytes(), Pcm(RATE, encoding="FLOAT"))


def test_a_container_of_another_kind_is_refused():
    refused(Fault.WRONG_CONTAINER, "declared to be wav and is mp3", decode, MP3, Container.WAV)
    refused(Fault.WRONG_CONTAINER, "declared to be flac and is wav", decode, WAV, Container.FLAC)
    refused(Fault.WRONG_CONTAINER, "raw samples.*wav header", decode_pcm, WAV, Pcm(RATE))
    refused(Fault.WRONG_CONTAINER, "RIFF, but b'AVI '", decode, WAV.replace(b"WAVE", b"AVI ", 1), Container.WAV)


def test_an_encoding_that_is_not_read_is_refused_with_those_that_are():
    refused(Fault.UNSUPPORTED, "tag 2 with 4 bits.*PCM_16", decode, file("WAV", "MS_ADPCM"), Container.WAV)


NOT_AUDIO = {
    "JSON": (b'{"error": {"message": "model not loaded"}}', "JSON"),
    "JSON list": (b'\n[{"b64_json": ""}]', "JSON"),
    "HTML": (b"<!DOCTYPE html><html><body>502 Bad Gateway</body></html>", "HTML"),
    "text": (b"Internal Server Error\n", "text"),
    "base64": (base64.b64encode(WAV), "a wav file left in base64"),
}


@pytest.mark.parametrize(("content", "kind"), NOT_AUDIO.values(), ids=NOT_AUDIO)
def test_what_is_no_audio_is_named(content, kind):
    refused(Fault.NOT_MEDIA, f"is {kind}.*begins", decode, content, Container.WAV)
    refused(Fault.NOT_MEDIA, f"is {kind}.*begins", decode_pcm, content, Pcm(RATE))


def test_unknown_bytes_are_shown():
    refused(Fault.NOT_MEDIA, r"\\xff\\xf1", decode, b"\xff\xf1\x50\x80" * 9, Container.MP3)  # AAC has another layer
    refused(Fault.NOT_MEDIA, r"\\x80\\x81", decode, bytes(range(128, 200)), Container.WAV)


# --- out ---------------------------------------------------------------------------------------------------------


def test_sixteen_bits_survive_a_file():
    every = np.arange(-32768, 32768).astype(np.int16)
    again = decode(encode_wav(int16_to_float(every), RATE), Container.WAV)
    assert np.array_equal(float_to_int16(again.samples[0]), every)
    assert np.abs(decode(WAV, Container.WAV).samples[0] - VOICE).max() <= 2**-16  # the nearest step, not the one below


def test_resampling_keeps_time_pitch_and_channels_apart():
    left, right = tone(440), tone(1000)
    both = resample(np.stack([left, right]).astype(np.float32), RATE, 16_000)
    assert both.shape == (2, 16_000)
    for channel, hertz in zip(both, (440, 1000), strict=True):
        inner = slice(500, -500)
        np.testing.assert_allclose(channel[inner], tone(hertz, rate=16_000)[inner], atol=1e-3)


def test_resampling_removes_what_the_lower_rate_cannot_hold():
    assert np.abs(resample(tone(10_000)[None].astype(np.float32), RATE, 16_000)[0, 500:-500]).max() < 1e-3


# --- headers and chunks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "headers"),
    [(WAV, 1), (WAV * 3, 3), (FLAC, 1), (FLAC * 2, 2), (OPUS, 1), (OPUS * 2, 2), (MP3, 1), (MP3 * 2, 2), (b"", 0)],
)
def test_headers_are_counted_wherever_a_file_begins(content, headers):
    assert count_headers(content) == headers


def test_a_header_inside_raw_samples_is_counted_and_raw_samples_have_none():
    raw = WAV[44:]
    assert count_headers(raw) == 0
    assert count_headers(raw[:1000] + WAV[:44] + raw[1000:]) == 1


@pytest.mark.parametrize(
    ("sizes", "starts"),
    [
        ([len(WAV)], []),
        ([44, 2000, len(WAV) - 2044], [1000]),  # the header alone makes no seam
        ([20, 24, 2000, len(WAV) - 2044], [1000]),
        ([44 + 2001, len(WAV) - 2045], [1000]),
        ([2044, 0, len(WAV) - 2044], [1000]),
    ],
)
def test_chunks_start_at_samples_wherever_the_header_ends(sizes, starts):
    assert chunk_starts(WAV, decode(WAV, Container.WAV), sizes) == starts


def test_chunks_of_two_channels_are_counted_in_samples_of_one():
    wav = encode_wav(np.stack([VOICE, VOICE]), RATE)
    assert chunk_starts(wav, decode(wav, Container.WAV), [44 + 4000, len(wav) - 4044]) == [1000]


def test_chunks_of_raw_samples_start_where_their_bytes_do_and_those_of_coded_audio_nowhere():
    assert chunk_starts(WAV[44:], decode_pcm(WAV[44:], Pcm(RATE)), [2000, len(WAV) - 2044]) == [1000]
    assert chunk_starts(FLAC, decode(FLAC, Container.FLAC), [2000, len(FLAC) - 2000]) is None


@pytest.mark.parametrize(("content", "name"), [(WAV, "a.wav"), (FLAC, "a.flac"), (MP3, "a.mp3"), (OPUS, "a.opus")])
def test_audio_in_a_table_is_read_by_the_suffix_of_its_name(content, name):
    assert decode_named(content, name).rate == RATE


def test_raw_samples_in_a_table_need_to_be_told_what_they_are():
    assert decode_named(WAV[44:], "a.pcm", Pcm(RATE)).samples.shape == (1, RATE)
    refused(Fault.UNSUPPORTED, "no raw samples", decode_named, WAV[44:], "a.pcm")
