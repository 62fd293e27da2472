"""Audio on a page: what is embedded is what was there, pictures show where sound is, and the page does not overflow."""

import base64
import io

import av
import numpy as np
import pytest

from assay.media.audio import Audio, Container, Header, decode
from assay.report.sound import COLUMNS, MOST_HZ, ROWS, Room, player, shades, waveform

RATE = 16_000


def audio(samples, rate=RATE):
    return Audio(np.atleast_2d(np.asarray(samples, np.float32)), rate, Container.WAV, "PCM_16", Header())


def tone(hertz, seconds=1.0, rate=RATE):
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


def embedded(source):
    head, _, content = source.partition(",")
    return head, base64.b64decode(content)


def test_the_embedded_file_is_the_audio():
    shown = player(audio(tone(440)), Room())
    head, content = embedded(shown.source)
    again = decode(content, Container.FLAC, rate=RATE, channels=1)
    assert head == "data:audio/flac;base64"
    assert np.abs(again.samples[0] - tone(440)).max() < 1 / 32768
    assert (shown.duration_s, shown.rate, shown.channels) == (1.0, RATE, 1)


def test_channels_are_mixed_and_high_rates_lowered_but_told():
    shown = player(audio([tone(440, rate=48_000), np.zeros(48_000)], 48_000), Room())
    again = decode(embedded(shown.source)[1], Container.FLAC, rate=MOST_HZ, channels=1)
    assert again.duration_s == shown.duration_s == 1.0
    assert np.abs(again.samples).max() == pytest.approx(0.25, abs=0.01)  # half of one channel
    assert (shown.rate, shown.channels) == (48_000, 2)


def test_a_full_page_takes_no_more_audio_and_counts_what_it_refuses():
    size = len(embedded(player(audio(tone(440)), Room()).source)[1])
    room = Room(size)
    first, second = (player(audio(tone(440)), room) for _ in range(2))
    assert first.source and second.source is None and second.waveform == first.waveform
    assert (room.left, room.refused) == (0, 1)


def test_a_waveform_shows_where_sound_is():
    path = waveform(np.concatenate([np.zeros(1000), np.full(1000, 0.5), np.full(1000, -2.0)]).astype(np.float32))
    points = [tuple(map(float, point.split())) for point in path[1:-1].split("L")]
    assert len(points) == 2 * COLUMNS
    third = COLUMNS // 3
    assert {y for _, y in points[10 : third - 10]} == {1.0}
    assert {y for _, y in points[third + 10 : 2 * third - 10]} == {0.5}
    assert {y for _, y in points[2 * third + 10 : COLUMNS]} == {2.0}  # beyond full scale: at the edge


@pytest.mark.parametrize("count", [1, 7, COLUMNS, COLUMNS + 1])
def test_short_audio_is_drawn(count):
    shown = player(audio(np.full(count, 0.25)), Room())
    assert shown.waveform.count("L") == 2 * min(count, COLUMNS) - 1


@pytest.mark.parametrize(("hertz", "row"), [(500, ROWS * 15 // 16), (4000, ROWS // 2), (7500, ROWS // 16)])
def test_a_tone_is_a_dark_line_at_its_height(hertz, row):
    grey = shades(tone(hertz).astype(np.float32), RATE)
    assert len(grey) == ROWS and grey.min() == 0
    assert abs(int(grey.mean(axis=1).argmin()) - row) <= 1


def test_a_picture_is_no_larger_than_it_is_shown():
    assert shades(tone(440, 60).astype(np.float32), RATE).shape == (ROWS, COLUMNS)
    assert shades(tone(440, 0.001).astype(np.float32), RATE).shape[1] == 1


def test_silence_is_white():
    assert (shades(np.zeros(RATE, np.float32), RATE) == 255).all()


def test_the_picture_is_a_png_that_decodes_to_its_shades():
    samples = tone(2000).astype(np.float32)
    head, content = embedded(player(audio(samples), Room()).spectrogram)
    with av.open(io.BytesIO(content)) as file:
        (frame,) = file.decode(video=0)
    assert head == "data:image/png;base64"
    assert (frame.to_ndarray(format="gray") == shades(samples, RATE)).all()
