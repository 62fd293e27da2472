"""What the judge notes of served speech: bad bytes by their reason, good ones by their numbers, each heard once."""

import base64
import io
import struct

import numpy as np
import pytest
import soundfile
from spoken import RATE, Listening, response, speech

from assay import store
from assay.judging.tts import Listener, judge_rows
from assay.media.audio import Pcm, encode_wav
from assay.records import JUDGE
from assay.verdicts.tts.planted import CONTROLS

ALPHA = speech("alpha")
WAV = encode_wav(ALPHA, RATE)


def judged(*responses, listener=None):
    return list(judge_rows(iter(responses), listener or Listener(Listening())))


def examined(content, name="speech.wav", pcm=None, **changes):
    audio = {"bytes": content, "path": name}
    (row,) = judged(response(audio=audio, **changes), listener=Listener(Listening(), pcm))
    return row


def sized(size):
    return WAV[:40] + struct.pack("<I", size) + WAV[44:]


def encoded(container, subtype=None, samples=ALPHA):
    buffer = io.BytesIO()
    soundfile.write(buffer, samples.T, RATE, format=container, subtype=subtype)
    return buffer.getvalue()


def with_nan(samples):
    damaged = samples.copy()
    damaged[0, 100] = np.nan
    return damaged


# --- bad bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "fault", "says"),
    [
        (WAV[:-1000], "truncated", "declares"),
        (b"", "empty", "no bytes"),
        (sized(0)[:44], "no_samples", "no samples"),
        (WAV[:40] + struct.pack("<I", len(WAV) - 45) + WAV[44:-1], "partial_frame", "too many"),
        (encoded("WAV", "FLOAT", with_nan(ALPHA)), "nonfinite", "NaN"),
        (WAV * 3, "concatenated", "3 WAV headers"),
        (base64.b64encode(WAV), "not_media", "left in base64"),
        (base64.b64encode(b'{"error": "busy"}'), "not_media", "text"),
        (b'{"error": "busy"}', "not_media", "JSON"),
        (encoded("FLAC"), "wrong_container", "declared to be wav"),
    ],
)
def test_bytes_that_are_no_speech_become_a_row_that_says_why(content, fault, says):
    row = examined(content)
    assert (row["fault"], row.get("samples"), row.get("text")) == (fault, None, None)
    assert says in row["error"]
    store.table_from_rows("transcripts", [row])


def test_a_name_of_no_known_format_is_a_reason_too():
    assert examined(WAV, "speech.aac")["fault"] == "unsupported"


@pytest.mark.parametrize("status", ["http_error", "timeout", "not_sent"])
def test_a_request_without_an_answer_keeps_its_row_and_its_reason(status):
    (row,) = judged(response(status=status, error="HTTP 500: busy", audio=None))
    assert (row["error"], row.get("fault")) == (f"{status}: HTTP 500: busy", None)


# --- good bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "name", "codec"),
    [
        (WAV, "speech.wav", "PCM_16"),
        (sized(0xFFFFFFFF), "speech.wav", "PCM_16"),
        (encoded("WAV", "PCM_U8"), "speech.wav", "PCM_U8"),
        (encoded("WAV", "FLOAT"), "speech.wav", "FLOAT"),
        (encoded("FLAC"), "speech.flac", "flac"),
        (encoded("MP3"), "speech.mp3", "mp3"),
        (encoded("OGG", "OPUS"), "speech.opus", "opus"),
    ],
)
def test_every_declared_format_is_read_whole(content, name, codec):
    row = examined(content, name)
    assert (row.get("fault"), row["codec"], row["rate"], row["channels"]) == (None, codec, RATE, 1)
    assert row["samples"] == pytest.approx(ALPHA.shape[-1], rel=0.02)  # coded audio ends with its last frame
    assert row["headers"] == 1
    assert row["has_speech"]


def test_raw_samples_are_read_at_the_models_rate_and_have_no_header():
    row = examined(WAV[44:], "speech.pcm", Pcm(RATE))
    assert (row["samples"], row["format"], row["headers"], row["container"]) == (ALPHA.shape[-1], "pcm", 0, None)


def test_a_header_in_the_middle_of_raw_samples_is_counted():
    half = 44 + 2 * (ALPHA.shape[-1] // 2)
    row = examined(WAV[44:half] + WAV[:44] + WAV[half:], "speech.pcm", Pcm(RATE))
    assert (row.get("fault"), row["headers"]) == (None, 1)


def test_a_length_left_open_by_the_header_is_unknown_and_the_samples_are_counted():
    row = examined(sized(0xFFFFFFFF))
    assert (row["samples_declared"], row["samples"]) == (None, ALPHA.shape[-1])


def test_a_patched_rate_shows_in_the_byte_rate_and_in_the_length():
    patched = WAV[:24] + struct.pack("<I", 16_000) + WAV[28:]
    row = examined(patched)
    assert not row["byte_rate_agrees"]
    assert row["duration_s"] == pytest.approx(1.5 * ALPHA.shape[-1] / RATE)


def test_digital_silence_has_no_level_and_no_speech_and_is_not_listened_to():
    listening = Listening()
    (row,) = judged(response(samples=np.zeros((1, RATE))), listener=Listener(listening))
    assert (row["level_dbfs"], row["has_speech"], row["text"], row["words"]) == (None, False, "", [])
    assert listening.asked == []


def test_noise_as_loud_as_speech_is_not_listened_to():
    noise = 0.05 * np.random.default_rng(0).standard_normal((1, RATE))
    (row,) = judged(response(samples=noise))
    assert (row["has_speech"], row["text"]) == (False, "")


def test_speech_is_listened_to_whole_with_all_its_channels():
    listening = Listening()
    (row,) = judged(response(samples=np.concatenate([ALPHA, ALPHA])), listener=Listener(listening))
    assert [samples.shape for samples in listening.asked] == [(2, ALPHA.shape[-1])]
    assert (row["channels"], row["text"]) == (2, "one two three four")


def test_the_same_samples_are_heard_once_whatever_pass_or_file_they_come_in():
    listening = Listening()
    flac = {"bytes": encoded("FLAC"), "path": "speech.flac"}
    rows = judged(
        response(arm="served_0_alone"),
        response(arm="served_0_load"),
        response(arm="served_1_load", audio=flac),
        listener=Listener(listening),
    )
    assert len(listening.asked) == 1
    assert len({row["pcm_sha256"] for row in rows}) == 1
    judged(response(samples=0.5 * ALPHA), listener=Listener(listening))
    assert len(listening.asked) == 2


def test_only_audio_that_came_lately_is_remembered_so_that_a_set_may_have_any_length(monkeypatch):
    monkeypatch.setattr("assay.judging.tts.REMEMBERED", 4)
    listening = Listening()
    listener = Listener(listening, embed=lambda samples, rate: samples[0, :1])
    alike = [0.5, 0.6, 0.7, 0.8, 0.8, 0.5, 0.9, 0.5]  # the last one is heard again: four others came since
    judged(*(response(samples=level * ALPHA) for level in alike), listener=listener)
    assert len(listening.asked) == len(set(alike)) + 1
    assert all(len(known) == 4 for known in (listener._measured, listener._heard, listener._embedded))


def test_words_have_times_in_the_judges_own_answers_alone_in_whatever_order_they_come():
    as_served = np.rint(ALPHA * 32768) / 32768  # 16 bits; what is planted in it is listened to as well
    for arms, asked in (([JUDGE, "float32-graph"], 1), (["float32-graph", JUDGE], 2)):
        listening = Listening()
        rows = judged(*(response(arm=arm) for arm in arms), listener=Listener(listening))
        clean = {row["arm"]: row for row in rows if row["arm"] in arms}
        assert {arm: len(row["words"]) for arm, row in clean.items()} == {JUDGE: 4, "float32-graph": 0}
        assert len({row["text"] for row in clean.values()}) == 1
        assert sum(np.array_equal(samples, as_served) for samples in listening.asked) == asked


# --- seams -------------------------------------------------------------------------------------------------------


def chunked(content, sizes):
    return {"audio": {"bytes": content, "path": "speech.wav"}, "chunk_bytes": sizes}


def test_seams_lie_where_the_chunks_of_a_stream_met():
    rest = len(WAV) - 44 - 24_000 - 24_000
    (row,) = judged(response(**chunked(WAV, [44, 24_000, 24_000, rest])))
    assert row["seams"] == [12_000, 24_000]
    assert len(row["seam_ranks"]) == len(row["seam_repeats"]) == 2


def test_an_answer_that_was_not_streamed_has_no_seams():
    (row,) = judged(response())
    assert "seams" not in row


def test_a_sample_cut_in_two_belongs_to_the_chunk_that_ends_it():
    (row,) = judged(response(**chunked(WAV, [44 + 24_001, len(WAV) - 44 - 24_001])))
    assert row["seams"] == [12_000]


# --- whose voice it is -------------------------------------------------------------------------------------------


class Embedding:
    """Knows one voice, or none, and counts how often it was asked."""

    def __init__(self, embedding=(0.6, 0.8)):
        self.embedding, self.asked = embedding, []

    def __call__(self, samples, rate):
        self.asked.append(samples)
        return None if self.embedding is None else np.array(self.embedding)


def test_whose_voice_it_is_is_asked_once_of_each_audio_and_of_the_one_control_that_goes_by_it():
    embed = Embedding()
    rows = judged(response("alpha", JUDGE), response("alpha"), listener=Listener(Listening(), embed=embed))
    named = {row["arm"]: row["speaker_embedding"] for row in rows if "speaker_embedding" in row}
    assert named == {arm: [0.6, 0.8] for arm in (JUDGE, "served_0_alone", "control_another_speaker")}
    assert len(embed.asked) == 2
    store.table_from_rows("transcripts", rows)


def test_sound_without_speech_is_nobodys_voice_and_no_network_asked_nobody():
    embed = Embedding()
    silent = response(samples=np.zeros((1, RATE)))
    (row,) = judged(silent, listener=Listener(Listening(), embed=embed))
    assert (row["speaker_embedding"], embed.asked) == ([], [])
    (row,) = judged(response(), listener=Listener(Listening(), embed=Embedding(None)))
    assert row["speaker_embedding"] == []
    (row,) = judged(response())
    assert "speaker_embedding" not in row


# --- planted faults ----------------------------------------------------------------------------------------------


def test_every_fault_is_planted_in_the_judges_own_speech_and_in_no_other():
    rows = judged(response("alpha", JUDGE), response("bravo", JUDGE), response("bravo", "float32-repeat"))
    arms = {row["arm"] for row in rows}
    assert arms == {JUDGE, "float32-repeat", *(f"control_{control.name}" for control in CONTROLS)}
    store.table_from_rows("transcripts", rows)


def planted(name, item="bravo", text="one two three four"):
    rows = judged(response("alpha", JUDGE), response("bravo", JUDGE), listener=Listener(Listening(text)))
    clean, found = ({row["item_id"]: row for row in rows if row["arm"] == arm} for arm in (JUDGE, f"control_{name}"))
    return clean[item], found[item]


@pytest.mark.parametrize(
    ("name", "shows"),
    [
        ("mislabelled", lambda clean, bad: bad["rate"] == 16_000),
        ("header_each_chunk", lambda clean, bad: (bad["fault"], bad["headers"]) == ("concatenated", 6)),
        ("overdriven", lambda clean, bad: bad["clip_fraction"] > 0.01 and clean["clip_fraction"] == 0),
        ("said_twice", lambda clean, bad: bad["duration_s"] == 2 * clean["duration_s"] and bad["repeat"] > 0.9),
        ("noise", lambda clean, bad: (bad["has_speech"], bad["text"]) == (False, "")),
        ("last_word_lost", lambda clean, bad: bad["duration_s"] < clean["words"][-1]["start"]),
        ("edges_lost", lambda clean, bad: clean["samples"] - bad["samples"] == 5 * 552),
        ("edges_lost", lambda clean, bad: np.median(bad["seam_ranks"]) < 0.05),
        ("inverted", lambda clean, bad: bad["level_dbfs"] == pytest.approx(clean["level_dbfs"], abs=1e-3)),
    ],
)
def test_a_planted_fault_shows_in_the_numbers_it_should(name, shows):
    assert shows(*planted(name))


def test_the_answer_to_the_request_before_sounds_like_it():
    before, _ = planted("another_item", "alpha")
    _, found = planted("another_item", "bravo")
    assert found["pcm_sha256"] == before["pcm_sha256"]


def test_a_stretch_is_drowned_in_long_texts_only():
    clean, short = planted("stretch_lost")
    assert short["pcm_sha256"] == clean["pcm_sha256"]
    clean, drowned = planted("stretch_lost", text=" ".join(map(str, range(30))))
    assert drowned["pcm_sha256"] != clean["pcm_sha256"]
    assert drowned["samples"] == clean["samples"]
