"""Parquet in and out: schema checked both ways, nothing half-written, nothing lost."""

import errno
import json

import numpy as np
import pyarrow as pa
import pytest

from assay import store
from assay.errors import StoreError


def response(item_id, arm="judge", **more):
    base = {"item_id": item_id, "set_id": "s", "arm": arm, "status": "ok", "evidence": "E0", "attempts": 1}
    return base | more


def test_rows_come_back_sorted_by_key_with_their_provenance(tmp_path):
    path = tmp_path / "r.parquet"
    table = store.table_from_rows(
        "responses", [response("b"), response("a", "z"), response("a", top_logprobs=[[-1.0]])]
    )
    store.write_table(path, "responses", table, {"rule": "test"})
    rows = store.read_rows(path, "responses", ["item_id", "arm", "top_logprobs"])
    assert [(row["item_id"], row["arm"]) for row in rows] == [("a", "judge"), ("a", "z"), ("b", "judge")]
    assert rows[0]["top_logprobs"] == [[-1.0]]
    assert store.read_provenance(path)["rule"] == "test"


def test_provenance_that_is_known_later_is_added_and_the_rows_stay(tmp_path):
    path = tmp_path / "r.parquet"
    with store.table_writer(path, "responses", {"rule": "test", "devices": None}) as writer:
        for name in ("a", "b"):
            writer.write(store.table_from_rows("responses", [response(name)]))
    before = store.read_rows(path, "responses")
    store.add_provenance(path, {"devices": {"leased": 1}})
    assert store.read_provenance(path) == {"table": "responses", "rule": "test", "devices": {"leased": 1}}
    assert store.read_rows(path, "responses") == before
    assert [table.num_rows for table in store.iter_tables(path, "responses")] == [1, 1]


def test_an_unknown_column_is_refused_rather_than_dropped():
    with pytest.raises(KeyError, match="latency"):
        store.table_from_rows("responses", [response("a", latency=1)])


def test_a_table_of_another_schema_is_refused_by_name(tmp_path):
    path = tmp_path / "r.parquet"
    store.write_table(path, "responses", store.table_from_rows("responses", [response("a")]), {})
    with pytest.raises(StoreError, match=r"holds a 'responses' table where 'scores' was expected"):
        store.read_table(path, "scores")


def test_a_truncated_file_says_what_to_do(tmp_path):
    path = tmp_path / "r.parquet"
    store.write_table(path, "responses", store.table_from_rows("responses", [response("a")]), {})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StoreError, match="remove it and run again"):
        store.read_table(path, "responses")


def test_a_parquet_file_of_somebody_else_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pa.parquet.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(StoreError, match="no Assay provenance"):
        store.read_table(path, "scores")


def test_a_full_disk_leaves_the_earlier_file_and_no_partial_one(tmp_path, monkeypatch):
    path = tmp_path / "r.parquet"
    store.write_table(path, "responses", store.table_from_rows("responses", [response("a")]), {})
    before = path.read_bytes()

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pa.parquet.ParquetWriter, "write_table", full)
    with pytest.raises(StoreError, match=r"cannot write .*r\.parquet: No space left on device"):
        store.write_table(path, "responses", store.table_from_rows("responses", [response("b")]), {})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["r.parquet"]


def test_an_exception_while_writing_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), store.table_writer(tmp_path / "r.parquet", "responses", {}):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_json_refuses_nan_and_reads_back_what_was_written(tmp_path):
    path = tmp_path / "v.json"
    store.write_json(path, {"b": 1, "a": "é"})
    assert json.loads(path.read_text()) == {"b": 1, "a": "é"} == store.read_json(path)
    with pytest.raises(ValueError, match="JSON compliant"):
        store.write_json(path, {"x": float("nan")})
    assert store.read_json(path) == {"b": 1, "a": "é"}


def test_damaged_json_names_the_file(tmp_path):
    path = tmp_path / "v.json"
    path.write_text("{")
    with pytest.raises(StoreError, match=r"v\.json is not valid JSON"):
        store.read_json(path)


def test_speech_and_transcriptions_come_back_as_they_were_served(tmp_path):
    said = {
        "audio": {"bytes": b"RIFF", "path": "a.wav"},
        "chunk_bytes": [3, 1],
        "chunk_ms": [12.5, 40.0],
        "language": "en",
        "segments": [{"start": 0.0, "end": 1.5, "text": "hello"}],
    }
    path = tmp_path / "r.parquet"
    table = store.table_from_rows("responses", [response("a", **said), response("b")])
    store.write_table(path, "responses", table, {})
    full, plain = store.read_rows(path, "responses", list(said))
    assert full == said
    assert plain == dict.fromkeys(said)


def test_tables_are_merged_item_by_item_a_few_rows_of_each_at_a_time(tmp_path):
    for name, keys in (("one", "abd"), ("two", "acd"), ("none", "")):
        rows = [
            {"item_id": key, "set_id": "s", "arm": name, "status": "ok", "evidence": "E1", "attempts": 1}
            for key in keys
        ]
        store.write_table(tmp_path / name, "responses", store.table_from_rows("responses", rows), {})
    paths = [tmp_path / name for name in ("one", "two", "none")]
    merged = [(row["item_id"], row["arm"]) for row in store.merge_rows(paths, "responses", ["item_id", "arm"], 2)]
    assert merged == [("a", "one"), ("a", "two"), ("b", "one"), ("c", "two"), ("d", "one"), ("d", "two")]


def test_a_table_that_is_not_sorted_cannot_be_merged_and_no_row_is_lost(tmp_path):
    path = tmp_path / "r.parquet"
    with store.table_writer(path, "responses", {}) as writer:
        for key in "ba":
            writer.write(store.table_from_rows("responses", [response(key)]))
    with pytest.raises(StoreError, match=r"r\.parquet: item 'a' comes after 'b'"):
        list(store.merge_rows([path], "responses", ["item_id"], 16))


def test_reading_media_holds_a_few_rows_whatever_the_length_of_the_table(tmp_path):
    path, rng = tmp_path / "r.parquet", np.random.default_rng(0)
    with store.table_writer(path, "responses", {}) as writer:
        for number in range(64):
            audio = {"bytes": rng.bytes(250_000), "path": "a.wav"}
            writer.write(store.table_from_rows("responses", [response(f"item-{number:02d}", audio=audio)]))
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in store.iter_rows(path, "responses", ["audio"], 4)]
    assert len(held) == 64
    assert max(held) < 4_000_000  # of 16 MB


def test_what_was_found_stands_beside_its_key_and_nothing_beside_the_others():
    found = iter([("b", 1), ("c", 2), ("f", 3)])
    assert list(store.beside("abde", found, 0)) == [0, 1, 0, 0]
    assert list(store.beside("ab", iter([]), 0)) == [0, 0]


def test_rows_of_an_item_are_still_there_when_it_is_their_turn(tmp_path):
    path = tmp_path / "r.parquet"
    rows = [response(key, arm) for key in "ac" for arm in ("judge", "served_0_alone")]
    store.write_table(path, "responses", store.table_from_rows("responses", rows), {})
    found = store.beside("abc", store.rows_by_item([path], "responses", ["item_id", "arm"], 16), iter(()))
    assert [[row["arm"] for row in rows] for rows in found] == [
        ["judge", "served_0_alone"],
        [],
        ["judge", "served_0_alone"],
    ]
