"""The speech reference: it decodes as transformers does, forcing agrees with decoding, windows are found again."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import tiny_whisper
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_whisper import END, FIRST_STAMP

from assay.errors import SourceError
from assay.media.audio import encode_wav
from assay.metrics.speech import Segment
from assay.references.arms import ArmSettings, arm_settings
from assay.references.whisper import RATE, Clip, Heard, Whisper, clip_of, dithered
from assay.references.whisper_tokens import Window, cut, windows
from assay.references.word_times import token_frames, warp, words

SECONDS = [1.0, 4.0, 31.0, 2.5, 62.0]


def sound(seconds, seed=0):
    return np.random.default_rng(seed).normal(0, 0.1, int(seconds * RATE)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_whisper.build(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def whisper(folder):
    return Whisper(folder, ArmSettings("float32"))


@pytest.fixture(scope="module")
def clips():
    return [Clip(f"clip{n}", sound(seconds, n), "en") for n, seconds in enumerate(SECONDS)]


@pytest.fixture(scope="module")
def transcripts(whisper, clips):
    return {done.item_id: done for done in whisper.generate(clips)}


def test_weights_for_english_alone_are_refused_by_name(tmp_path):
    path = tiny_whisper.build(tmp_path) / "generation_config.json"
    config = json.loads(path.read_text())
    del config["lang_to_id"], config["task_to_id"]
    path.write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"generation_config\.json has no lang_to_id and no task_to_id.*multilingual"):
        Whisper(tmp_path, ArmSettings("float32"))


# --- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_window_is_decoded_as_transformers_decodes_it(tmp_path, seed):
    whisper = Whisper(tiny_whisper.build(tmp_path, seed), ArmSettings("float32"))
    heard = Heard(whisper, Clip("a", sound(5, seed), "en"))
    with torch.inference_mode():
        (found,) = whisper._decode(heard.encoded(0), ["en"])
    expected = whisper.model.generate(
        heard.window(0)[None],
        return_timestamps=True,
        language="en",
        task="transcribe",
        force_unique_generate_call=True,
        do_sample=False,
    )[0].tolist()
    assert expected[:3] == whisper.vocabulary.prompt("en")
    assert found.tokens == [token for token in expected[3:] if token != END]


def test_every_clip_comes_back_once_and_long_ones_were_heard_to_their_end(transcripts, clips):
    assert sorted(transcripts) == [clip.item_id for clip in clips]
    for clip in clips:
        heard = transcripts[clip.item_id].no_speech
        assert len(heard) >= -(-clip.seconds // 30)


@pytest.mark.parametrize("change", [{"batch": 1}, {"batch": 2}, {"attention": "eager"}, {"alternative_matmul": True}])
def test_a_harmless_change_changes_nothing_but_rounding(folder, clips, transcripts, change):
    other = Whisper(folder, replace(ArmSettings("float32"), **change))
    for done in other.generate(clips):
        base = transcripts[done.item_id]
        assert done.token_ids == base.token_ids
        np.testing.assert_allclose(done.logprobs, base.logprobs, atol=1e-3)


@torch.inference_mode()
def test_the_language_is_found_out_where_none_is_asked_for(whisper, clips):
    found = {whisper.transcribe(clip.samples).language for clip in clips}
    assert found <= {"en", "de"}
    heard = Heard(whisper, clips[0])
    logits = whisper.model(encoder_outputs=(heard.encoded(0),), decoder_input_ids=torch.tensor([[END + 1]])).logits[
        0, -1
    ]
    assert whisper.transcribe(clips[0].samples).language == ("en" if logits[END + 2] > logits[END + 3] else "de")


def test_a_stereo_file_at_another_rate_is_heard_as_mono_at_16_khz():
    tone = np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000).astype(np.float32)
    file = {"bytes": encode_wav(np.stack([tone, np.zeros_like(tone)]) * 0.5, 24_000), "path": "a.wav"}
    clip = clip_of({"item_id": "a", "audio": file, "request": "{}"})
    assert clip.language is None
    assert len(clip.samples) == RATE
    spectrum = np.abs(np.fft.rfft(clip.samples))
    assert spectrum.argmax() == 440
    assert abs(np.abs(clip.samples[2000:-2000]).max() - 0.25) < 0.01


def test_behind_the_audio_are_zeros_or_what_silence_sounds_like_as_it_is_asked_for(folder):
    clip = Clip("a", sound(31.5), "en")
    found = {}
    for padding in ("audio", "features"):
        whisper = Whisper(folder, arm_settings("float32-attention", {"dtype": "float32", "padding": padding}))
        heard = Heard(whisper, clip)
        found[padding] = heard.window(0), heard.window(3000)
    silence, zeros = found["audio"][1][:, 150:], found["features"][1][:, 150:]
    assert silence.shape == zeros.shape == (80, 2850)
    assert (zeros == 0).all() and (silence[:, 5:] == silence.min()).all() and silence.min() < 0
    assert (found["audio"][0] == found["features"][0]).all()
    assert (found["audio"][1][:, :150] == found["features"][1][:, :150]).all()


def test_dither_is_below_what_anyone_hears_and_the_same_each_time():
    noise = dithered(np.zeros(RATE, np.float32)) * 32768
    assert 0.3 < np.abs(noise).max() <= 1
    assert abs(noise.std() - 6**-0.5) < 0.01  # of a triangle from -1 to 1
    assert (dithered(np.zeros(RATE, np.float32)) * 32768 == noise).all()


def test_logprobs_are_those_that_forcing_gives(whisper, clips, transcripts):
    for clip in clips:
        transcript = transcripts[clip.item_id]
        found = [forced.lp_judge for _, forced in forced_windows(whisper, clip, transcript)]
        np.testing.assert_allclose(np.concatenate(found)[: len(transcript.logprobs)], transcript.logprobs, atol=1e-3)


# --- segments and windows -------------------------------------------------------------------------------------------


def stamp(seconds):
    return FIRST_STAMP + round(seconds / 0.02)


def test_a_window_that_ends_in_one_timestamp_is_whole():
    tokens = [stamp(0), 1, 2, stamp(2.4), stamp(2.6), 3, stamp(5)]
    pieces, after = cut(tokens, FIRST_STAMP, 3000, 1234)
    assert [piece.tokens for piece in pieces] == [(stamp(0), 1, 2, stamp(2.4)), (stamp(2.6), 3, stamp(5))]
    assert [piece.segment for piece in pieces] == [Segment(30.0, 32.4), Segment(32.6, 35.0)]
    assert after == 1234


def test_what_the_end_of_a_window_cut_off_is_heard_again_in_the_next():
    tokens = [stamp(0), 1, stamp(2.4), stamp(2.4), 3]
    pieces, after = cut(tokens, FIRST_STAMP, 0, 3000)
    assert [piece.tokens for piece in pieces] == [(stamp(0), 1, stamp(2.4))]
    assert after == 240


def test_a_window_without_a_pair_is_one_segment_to_its_last_timestamp_or_its_end():
    assert cut([stamp(0), 1], FIRST_STAMP, 100, 250) == (
        [replace(cut([1], FIRST_STAMP, 100, 250)[0][0], tokens=(stamp(0), 1))],
        250,
    )
    assert cut([stamp(0), 1], FIRST_STAMP, 100, 250)[0][0].segment == Segment(1.0, 3.5)
    assert cut([stamp(0.5), 1, stamp(2)], FIRST_STAMP, 100, 250)[0][0].segment.end_s == 3.0


def test_windows_are_found_again_from_tokens_and_starts():
    tokens = [stamp(0), 1, stamp(2.4), stamp(2.4), 2, stamp(28), stamp(0.2), 3, stamp(0), 4]
    starts = [0.0, 2.4, 28.2, 58.0]
    assert windows(tokens, starts, FIRST_STAMP) == [
        Window(0, tuple(tokens[:6])),
        Window(2800, tuple(tokens[6:8])),
        Window(5800, tuple(tokens[8:])),
    ]
    assert windows(tokens, starts[1:], FIRST_STAMP) is None
    assert windows([7, 8], [0.0], FIRST_STAMP) == [Window(0, (7, 8))]


texts = st.lists(st.integers(0, END - 1), min_size=1, max_size=4)
gaps = st.lists(st.integers(1, 300), min_size=2, max_size=2)
segments = st.lists(st.tuples(texts, gaps), min_size=1, max_size=4)


@given(st.lists(st.tuples(segments, st.booleans()), min_size=1, max_size=4))
def test_windows_of_any_decoding_are_found_again(decoded):
    """Windows end in one timestamp (whole) or in a pair and something cut off."""
    expected, tokens, starts, seek = [], [], [], 0
    for parts, whole in decoded:
        said, at = [], 0
        for text, (silence, length) in parts:
            at += silence * bool(said)
            said += [FIRST_STAMP + at, *text, FIRST_STAMP + at + length]
            at += length
        pieces, after = cut(said if whole else [*said, said[-1], 3], FIRST_STAMP, seek, 3000)
        expected.append(Window(seek, tuple(said)))
        tokens += [token for piece in pieces for token in piece.tokens]
        starts += [piece.segment.start_s for piece in pieces]
        seek += after
    assert windows(tokens, starts, FIRST_STAMP) == expected


# --- teacher forcing ----------------------------------------------------------------------------------------------


def forced_windows(whisper, clip, transcript):
    starts = [segment.start_s for segment, _ in transcript.segments]
    heard = Heard(whisper, clip)
    return [whisper.force(heard, "en", window) for window in whisper.windows(clip, transcript.token_ids, starts)]


def test_forcing_what_was_decoded_gives_no_margin_anywhere(whisper, clips, transcripts):
    seen = 0
    for clip in clips:
        for tokens, found in forced_windows(whisper, clip, transcripts[clip.item_id]):
            # A window that ran out of positions did not choose to end.
            chosen = slice(None, -1) if len(tokens) > whisper.room else slice(None)
            np.testing.assert_allclose(found.lp_judge[chosen], found.lp_judge_max[chosen], atol=1e-4)
            assert (found.judge_rank[chosen] == 1).all()
            seen += len(tokens)
    assert seen > 40


def test_a_wrong_token_shows_its_margin(whisper, clips, transcripts):
    clip = clips[1]
    starts = [segment.start_s for segment, _ in transcripts["clip1"].segments]
    window = whisper.windows(clip, transcripts["clip1"].token_ids, starts)[0]
    place = next(place for place, token in enumerate(window.tokens) if token < END)
    wrong = list(window.tokens)
    wrong[place] = (wrong[place] + 1) % END
    _, found = whisper.force(Heard(whisper, clip), "en", replace(window, tokens=tuple(wrong)))
    assert found.lp_judge_max[place] - found.lp_judge[place] > 0.01
    assert found.judge_rank[place] > 1


def test_an_early_end_shows_though_no_token_is_wrong(whisper, clips, transcripts):
    transcript = transcripts["clip4"]
    starts = [segment.start_s for segment, _ in transcript.segments]
    window = whisper.windows(clips[4], transcript.token_ids, starts)[0]
    text = [place for place, token in enumerate(window.tokens) if token < END]
    short = replace(window, tokens=window.tokens[: text[0] + 1])
    tokens, found = whisper.force(Heard(whisper, clips[4]), "en", short)
    assert tokens[-1] == END
    if window.tokens[text[0] + 1 : text[0] + 2] != ():
        assert found.lp_judge_max[-1] - found.lp_judge[-1] > 0.001


def test_a_token_against_the_rules_has_a_finite_margin(whisper, clips):
    _, found = whisper.force(Heard(whisper, clips[0]), "en", Window(0, (7, 5, stamp(1), stamp(0.5), stamp(0.4))))
    assert np.isfinite(found.lp_judge).all()


@torch.inference_mode()
def test_text_without_timestamps_is_forced_as_a_text_that_has_none(whisper, clips):
    tokens, found = whisper.force(Heard(whisper, clips[0]), "en", Window(0, (7, 8)), timestamps=False)
    assert tokens == [7, 8, END]
    logits = whisper.model(
        encoder_outputs=(Heard(whisper, clips[0]).encoded(0),),
        decoder_input_ids=torch.tensor([[END + 1, END + 2, END + 5, FIRST_STAMP - 1, 7, 8]]),
    ).logits[0, 3:]
    logits[:, [5, END + 1, END + 4]] = -torch.inf
    logits[0, [9, END]] = -torch.inf
    logits[:, FIRST_STAMP:] = -torch.inf
    expected = torch.log_softmax(logits, -1)
    np.testing.assert_allclose(found.lp_judge, [float(expected[n, token]) for n, token in enumerate(tokens)], atol=1e-4)


def test_windows_outside_the_clip_or_longer_than_the_decoder_are_refused(whisper, clips):
    assert whisper.windows(clips[0], [stamp(0), 7, stamp(1)], [5.0]) is None
    assert whisper.windows(clips[0], [stamp(0), *[7] * 30], [0.0]) is None
    assert whisper.windows(clips[0], [stamp(0), 7], [0.0]) == [Window(0, (stamp(0), 7))]


def test_text_that_does_not_survive_encoding_is_not_judged(whisper):
    assert whisper.decode(whisper.retokenise("hello there ")) == " hello there"
    assert whisper.retokenise("a\ufffd<|endoftext|>") is None


# --- words --------------------------------------------------------------------------------------------------------


def best_path(gain):
    """Brute force: the largest sum over monotone paths from corner to corner."""
    rows, columns = gain.shape

    def down(row, column):
        if (row, column) == (rows - 1, columns - 1):
            return gain[row, column]
        ways = [(row + 1, column), (row, column + 1), (row + 1, column + 1)]
        return gain[row, column] + max(down(r, c) for r, c in ways if r < rows and c < columns)

    return down(0, 0)


def path_gain(gain, first):
    """What the path gains that stays in each row from its first column to where the next row begins."""
    bounds = [*first, gain.shape[1]]
    total = 0.0
    for row, (low, high) in enumerate(itertools.pairwise(bounds)):
        options = [
            gain[row, low:stop].sum() for stop in {max(high, low + 1), min(high + 1, gain.shape[1])} if stop > low
        ]
        total += max(options)
    return total


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10_000))
def test_the_path_gains_most(rows, columns, seed):
    gain = np.random.default_rng(seed).normal(size=(rows, columns))
    first = warp(gain)
    assert first[0] == 0
    assert (np.diff(first) >= 0).all()
    assert path_gain(gain, first) == pytest.approx(best_path(gain), abs=1e-9)


def test_tokens_start_where_attention_moves_to_them():
    weights = np.full((1, 3, 30), 0.01)
    for token, (low, high) in enumerate([(0, 9), (9, 21), (21, 30)]):
        weights[0, token, low:high] = 1
    assert token_frames(weights, 7).tolist() == [0, 9, 21]


def test_words_are_tokens_joined_at_spaces():
    spoken = {1: " he", 2: "llo", 3: " there", 4: "."}

    def decode(ids):
        return "".join(spoken[token] for token in ids)

    found = words([1, 2, 3, 4], [0.0, 0.2, 0.5, 0.9, 1.0], decode)
    assert [(word.text, word.start_s, word.end_s) for word in found] == [("hello", 0.0, 0.5), ("there.", 0.5, 1.0)]


def test_words_of_a_transcript_lie_in_order_on_the_clip(whisper, clips):
    found = whisper.transcribe(clips[4].samples, "en", with_words=True)
    assert found.words
    starts = [word.start_s for word in found.words]
    assert starts == sorted(starts)
    assert starts[0] >= 0
    assert found.words[-1].end_s <= clips[4].seconds + 0.02
    assert "".join("".join(word.text for word in found.words).split()) == "".join(found.text.split())
