"""Sets of speech: what each kind holds, picks that nothing reshuffles, locks that cover the audio, media that play."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import yaml
from sample_sources import make_resources
from speech_sources import make_recordings

from assay.canonical import sha256_bytes, sha256_json
from assay.errors import ConfigError, SampleError
from assay.records import ITEMS, MEDIA
from assay.samples.build import build_set, write_lock
from assay.samples.lock import item_sha256, load_set, read_lock, verify_set
from assay.samples.ranking import pick
from assay.samples.recipe import ClipPart, LongClipPart, read_recipe
from assay.samples.speech import clips, kind_of, long_clips
from assay.store import read_rows, read_table, table_from_rows, write_table

SETS = Path(__file__).parents[2] / "samplesets"
RECORDINGS = ["asterisk_sounds", "asterisk_sounds_text", "pocketsphinx_testdata"]
ASR = {
    "description": "a small set",
    "modality": "asr",
    "seed": 7,
    "sources": RECORDINGS,
    "parts": [
        {"name": "plain", "kind": "plain", "count": 4},
        {"name": "word", "kind": "word", "count": 2},
        {"name": "digits", "kind": "digits", "count": 2},
        {"name": "names", "kind": "names", "count": 2},
        {"name": "long", "kind": "long", "count": 3, "seconds": [31, 34]},
        {
            "name": "nonspeech",
            "kind": "nonspeech",
            "count": 6,
            "sounds": ["recorded", "silence", "white", "music", "pink", "hum"],
            "seconds": [1, 2],
        },
        {"name": "resampled", "kind": "resampled", "count": 6, "formats": ["8000x1", "44100x2", "16000x2"]},
    ],
}
TTS = {
    "description": "a small set",
    "modality": "tts",
    "seed": 7,
    "sources": [*RECORDINGS, "lm_eval"],
    "parts": [
        {"name": "plain", "kind": "plain", "count": 3},
        {"name": "word", "kind": "word", "count": 2},
        {"name": "digits", "kind": "digits", "count": 2},
        {"name": "names", "kind": "names", "count": 2},
        {"name": "tail", "kind": "tail", "count": 4},
        {"name": "long", "kind": "long", "count": 1},
    ],
}

Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recordings(make_resources(tmp_path_factory.mktemp("resources")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, resources: Path) -> Path:
    """Recipes `clips`, `few` (a subset of it) and `texts`, each locked and built."""
    folder = tmp_path_factory.mktemp("samplesets")
    subset = {"description": "a subset", "subset_of": "clips", "counts": {"plain": 2, "nonspeech": 2, "resampled": 2}}
    for name, content in {"clips": ASR, "few": subset, "texts": TTS}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
        write_lock(name, folder, resources)
        build_set(name, folder / f"{name}.parquet", folder, resources)
    return folder


@pytest.fixture(scope="module")
def built(folder: Path) -> Rows:
    return {row["item_id"]: row for row in load_set(folder / "clips.parquet")}


def part(rows: Rows, name: str) -> Rows:
    return {item: row for item, row in rows.items() if row["tags"][0] == name}


def tagged(row: dict[str, Any], name: str) -> str:
    return next(tag.partition(":")[2] for tag in row["tags"] if tag.startswith(f"{name}:"))


def played(row: dict[str, Any]) -> tuple[float, int, int]:
    """Seconds, sample rate and channels of an item's audio, as soundfile reads them."""
    with soundfile.SoundFile(io.BytesIO(row["audio"]["bytes"])) as file:
        return file.frames / file.samplerate, file.samplerate, file.channels


# --- kinds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Please enter your password.", "plain"),
        ("One moment, please.", "plain"),
        ("Activated.", "word"),
        ("o'clock", "word"),
        ("seven", "digits"),
        ("eighth", "digits"),
        ("twelfth", "digits"),
        ("nineteenth", "digits"),
        ("sixtieth", "digits"),
        ("hundredth", "digits"),
        ("seconds", "word"),
        ("Press 1 to go on.", "digits"),
        ("ten of clubs", "digits"),
        ("mister john dashwood", "names"),
        ("Welcome to Comedian Mail.", "names"),
        ("Monday", "names"),
        ("you may dial it now", "plain"),
        ("May", "names"),
        ("Waldo's premier provider", "names"),
        ("z", None),
        ("A.", None),
        ("Thank you.", None),
        ("", None),
    ],
)
def test_a_text_is_of_the_kind_that_makes_it_hard(text: str, kind: str | None) -> None:
    assert kind_of(text) == kind


def test_clips_are_what_the_recording_says_in_turn_over_the_speakers(built: Rows) -> None:
    plain = part(built, "plain")
    assert len(plain) == 4
    assert plain["plain-librivox-0880"]["expected"] == "he was not an ill disposed young man"
    assert {tagged(row, "speaker") for row in plain.values()} == {"librivox", "prompts"}
    assert part(built, "word").keys() == {"word-hello", "word-time"}
    assert "digits-cards-001" in built
    assert part(built, "names").keys() == {"names-digits-day-1", "names-demo-thanks"}
    assert all("recorded" in row["tags"] for name in ("plain", "word", "names") for row in part(built, name).values())


def test_long_clips_pass_thirty_seconds_and_their_windows_end_while_somebody_speaks(built: Rows) -> None:
    rows = part(built, "long")
    assert rows["long-demo-instruct"]["expected"] == ("This is a long text. " * 20).strip()
    joined = [row for row in rows.values() if "joined" in row["tags"]]
    assert sorted(played(row)[0] // 1 for row in joined) == pytest.approx([31, 34], abs=3)
    for row in joined:
        samples, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="int16")
        assert samples[30 * rate - rate // 10 : 30 * rate + rate // 10].any()
        origins = row["source"].split(" + ")
        assert len(row["expected"].split()) >= 3 * len(origins) - 4  # the words of every part; digits have one
        assert len(set(origins)) == len(origins) > 8


def test_a_joined_clip_whose_window_ends_in_a_pause_is_left_out(resources: Path) -> None:
    sources = {name: resources / name for name in RECORDINGS}
    wanted = LongClipPart(name="long", kind="long", count=1, seconds=[31])
    runs = [item for item in long_clips(wanted, sources, 7) if "joined" in item.tags]
    possible = len(list(clips(ClipPart(name="plain", kind="plain", count=1), sources, 7)))
    possible += len(list(clips(ClipPart(name="digits", kind="digits", count=1), sources, 7)))
    assert 0 < len(runs) < possible


def test_nobody_is_expected_to_be_heard_in_sounds(built: Rows) -> None:
    rows = part(built, "nonspeech")
    assert len(rows) == 6
    assert {row["expected"] for row in rows.values()} == {""}
    made = [row for row in rows.values() if "synthetic" in row["tags"]]
    assert {tagged(row, "sound") for row in made} == {"silence", "white", "music", "pink", "hum"}
    assert all(row["source"].startswith("synthetic:") for row in made)
    silence = next(row for row in made if tagged(row, "sound") == "silence")
    assert set(silence["audio"]["bytes"][44:]) == {0}
    assert [row for row in rows.values() if row not in made and "recorded" in row["tags"]]


def test_resampled_copies_are_of_the_same_recordings_in_every_format(built: Rows) -> None:
    rows = part(built, "resampled")
    assert {tuple(map(int, (tagged(row, "rate"), tagged(row, "channels")))) for row in rows.values()} == {
        played(row)[1:] for row in rows.values()
    }
    by_format = {
        form: sorted(row["source"] for item, row in rows.items() if item.startswith(f"resampled-{form}-"))
        for form in ("8000x1", "44100x2", "16000x2")
    }
    assert [len(sources) for sources in by_format.values()] == [2, 2, 2]
    assert len({tuple(sources) for sources in by_format.values()}) == 1
    lengths = {row["source"]: [] for row in rows.values()}
    for row in rows.values():
        lengths[row["source"]].append(played(row)[0])
    assert all(max(length) - min(length) < 0.001 for length in lengths.values())


def test_an_item_is_a_canonical_request_with_its_audio_and_no_prompt_tokens(built: Rows) -> None:
    assert len(built) == 25
    for row in built.values():
        request = json.loads(row["request"])
        assert request == {"file": row["audio"]["path"], "language": "en", "temperature": 0}
        assert (row["kind"], row["modality"], row["prompt_tokens_ref"]) == ("transcription", "asr", None)
        assert row["prompt_sha256"] == sha256_json({**request, "file": sha256_bytes(row["audio"]["bytes"])})
    assert len({row["audio"]["bytes"] for row in built.values()}) == len(built)


def test_texts_to_speak_ask_for_what_they_expect(folder: Path) -> None:
    rows = {row["item_id"]: row for row in load_set(folder / "texts.parquet")}
    assert len(rows) == 14
    for row in rows.values():
        assert json.loads(row["request"]) == {"input": row["expected"]}
        assert (row["kind"], row["modality"], row["audio"]) == ("speech", "tts", None)
    assert {row["expected"] for row in part(rows, "word").values()} == {"Hello.", "Time."}
    assert all(any(char.isdigit() for char in row["expected"]) for row in part(rows, "digits").values())
    assert all(len(row["expected"].split()) >= 45 for row in part(rows, "long").values())
    for row in part(rows, "tail").values():
        words = row["expected"].rstrip(".").replace(",", "").split()
        assert words.count(words[-1]) == 1  # the last word is nowhere else


# --- picks --------------------------------------------------------------------------------------------------------


def test_an_added_recording_displaces_at_most_one_pick_of_a_part_and_reshuffles_nothing(
    built: Rows, folder: Path, tmp_path: Path
) -> None:
    extra = {"vm-new": ("Please enter the code of room x.", 2.7), "newword": ("Newly.", 0.6)}
    more = make_recordings(tmp_path / "more", extra)
    (tmp_path / "sets").mkdir()
    shutil.copy(folder / "clips.yaml", tmp_path / "sets")
    after = write_lock("clips", tmp_path / "sets", more).items
    before = read_lock("clips", folder).items
    for name, most in {"plain": 1, "word": 1, "digits": 0, "names": 0, "nonspeech": 0, "resampled": 3}.items():
        kept = part(built, name).keys() & after.keys()
        assert len(part(built, name)) - len(kept) <= most  # resampled: one recording in three formats
        assert all(after[item] == before[item] for item in kept)


def test_the_order_of_recordings_does_not_matter(resources: Path) -> None:
    sources = {name: resources / name for name in RECORDINGS}
    candidates = list(clips(ClipPart(name="digits", kind="digits", count=3), sources, 7))
    candidates.sort(key=lambda item: item.stratum)  # only the order of the strata matters
    turned = [item for stratum in ("cards", "prompts") for item in candidates[::-1] if item.stratum == stratum]
    assert turned != candidates
    assert [item.key for item in pick(candidates, 3, 7, "p")] == [item.key for item in pick(turned, 3, 7, "p")]


def test_a_subset_holds_the_same_items_as_the_set_it_is_of(built: Rows, folder: Path) -> None:
    few = read_lock("few", folder).items
    assert len(few) == 6
    rows = {row["item_id"]: row for row in load_set(folder / "few.parquet")}
    assert all(rows[item]["audio"] == built[item]["audio"] for item in few)


# --- locks --------------------------------------------------------------------------------------------------------


def test_a_set_is_built_again_to_the_same_hash(folder: Path, resources: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "clips.yaml", tmp_path)
    assert write_lock("clips", tmp_path, resources) == read_lock("clips", folder)


def test_one_changed_byte_of_audio_is_refused_by_its_item(built: Rows, folder: Path, tmp_path: Path) -> None:
    rows = [dict(row) for row in built.values()]
    lock = read_lock("clips", folder)
    changed = next(row for row in rows if row["item_id"] == "word-hello")
    content = bytearray(changed["audio"]["bytes"])
    content[-1] ^= 1
    changed["audio"] = {**changed["audio"], "bytes": bytes(content)}
    write_table(tmp_path / "clips.parquet", "items", table_from_rows("items", rows), {})
    with pytest.raises(SampleError, match="item word-hello differs"):
        list(verify_set(tmp_path / "clips.parquet", lock))
    changed["audio"] = built["word-hello"]["audio"]
    write_table(tmp_path / "clips.parquet", "items", table_from_rows("items", rows), {})
    assert len(list(verify_set(tmp_path / "clips.parquet", lock))) == len(rows)


def test_the_hash_of_an_item_covers_the_name_and_bytes_of_its_audio_and_is_as_before_without_any() -> None:
    row = {"item_id": "a", "request": "{}"}
    assert item_sha256(row) == item_sha256({**row, "audio": None}) == sha256_json(row)
    hashes = {
        item_sha256({**row, "audio": {"bytes": content, "path": path}})
        for content, path in [(b"a", "a.wav"), (b"b", "a.wav"), (b"a", "b.wav")]
    }
    assert len(hashes | {item_sha256(row)}) == 4


# --- media --------------------------------------------------------------------------------------------------------


def test_the_audio_column_is_in_the_form_that_datasets_plays(folder: Path) -> None:
    """https://huggingface.co/docs/datasets/about_dataset_features: struct<bytes, path> and the feature by name."""
    schema = pq.read_schema(folder / "clips.parquet")
    assert schema.field("audio") == pa.field("audio", pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    assert json.loads(schema.metadata[b"huggingface"]) == {"info": {"features": {"audio": {"_type": "Audio"}}}}
    assert json.loads(schema.metadata[b"assay"])["table"] == "items"
    assert pq.read_schema(folder / "texts.parquet").field("audio").type == MEDIA == ITEMS.field("audio").type


def test_every_clip_plays_to_the_length_of_its_recording(built: Rows) -> None:
    for row in built.values():
        seconds, rate, channels = played(row)
        assert row["audio"]["path"].endswith(".wav")
        with av.open(io.BytesIO(row["audio"]["bytes"])) as container:
            stream = container.streams.audio[0]
            frames = sum(frame.samples for frame in container.decode(stream))
            assert (frames / rate, stream.rate, stream.channels) == (seconds, rate, channels)
    assert played(built["word-hello"]) == (0.5, 16_000, 1)


# --- recipes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modality": "song"}, "'song'"),
        ({"tokenizer": "model"}, "unknown key 'tokenizer'"),
        ({"parts": [{"name": "a", "kind": "tail", "count": 1}]}, "'tail'"),
        ({"parts": [{"name": "a", "kind": "plain"}]}, "count' is missing"),
        ({"parts": [ASR["parts"][0]] * 2}, "a part is named twice"),  # type: ignore[index]
        ({"parts": [{"name": "a", "kind": "resampled", "count": 1, "formats": ["44.1k"]}]}, "formats"),
    ],
)
def test_a_wrong_recipe_is_refused_by_file_and_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "clips.yaml").write_text(yaml.safe_dump({**ASR, **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        read_recipe("clips", tmp_path)
    assert "clips.yaml" in str(caught.value)


def test_a_part_that_asks_for_too_much_is_refused(resources: Path, tmp_path: Path) -> None:
    (tmp_path / "clips.yaml").write_text(
        yaml.safe_dump({**ASR, "parts": [{"name": "word", "kind": "word", "count": 99}]})
    )
    with pytest.raises(SampleError, match="part 'word' wants 99 items, can make 2"):
        write_lock("clips", tmp_path, resources)


def test_a_recipe_that_does_not_name_a_source_it_needs_is_refused(resources: Path, tmp_path: Path) -> None:
    for name, recipe, missing in (("clips", ASR, "pocketsphinx_testdata"), ("texts", TTS, "lm_eval")):
        sources = [source for source in recipe["sources"] if source != missing]  # type: ignore[attr-defined]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**recipe, "sources": sources}))
        with pytest.raises(ConfigError, match=f"unknown source of the recipe '{missing}'"):
            write_lock(name, tmp_path, resources)


# --- the committed sets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("modality", "sizes"), [("asr", (26, 100, 272)), ("tts", (20, 64, 180))])
def test_the_sets_are_nested(modality: str, sizes: tuple[int, int, int]) -> None:
    smoke, standard, release = (
        read_lock(f"{modality}_{tier}", SETS).items for tier in ("smoke", "standard", "release")
    )
    assert (len(smoke), len(standard), len(release)) == sizes
    assert smoke.keys() < standard.keys() < release.keys()


@pytest.mark.model
@pytest.mark.parametrize("name", ["asr_smoke", "tts_smoke"])
def test_the_committed_smoke_sets_are_what_the_sources_make(
    name: str, tmp_path: Path, fetched: Callable[..., Path]
) -> None:
    recipe = read_recipe(name, SETS)
    build_set(name, tmp_path / f"{name}.parquet", SETS, fetched(*recipe.inputs))
    rows = read_rows(tmp_path / f"{name}.parquet", "items")
    assert {row["tags"][0] for row in rows} == {part.name for part in recipe.parts}
    assert read_table(tmp_path / f"{name}.parquet", "items", ["audio"]).num_rows == len(rows)
