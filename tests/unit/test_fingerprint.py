"""A digest of code: what changes behaviour changes it, what does not, does not."""

import shutil
from pathlib import Path

import pytest

import assay
from assay import fingerprint as module

PACKAGE = Path(assay.__file__).parent


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A copy of the library and scripts whose files may be edited."""
    shutil.copytree(PACKAGE, tmp_path / "assay", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE.parent / "scripts", tmp_path / "scripts")
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget():
    """What a process remembers: a file is read once in its life."""
    module.fingerprint.cache_clear()
    module._parse.cache_clear()


def digests(scripts):
    forget()
    return {path.stem: module.fingerprint(path) for path in sorted((scripts / "scripts").glob("*.py"))}


def test_comments_docstrings_and_formatting_do_not_count(scripts):
    before = digests(scripts)
    path = scripts / "assay/metrics/text.py"
    path.write_text("# a comment\n\n\n" + path.read_text().replace('"""', '"""More: ', 1))
    assert digests(scripts) == before


def test_an_edited_metric_changes_exactly_score_and_below(scripts):
    before = digests(scripts)
    path = scripts / "assay/metrics/text.py"
    path.write_text(path.read_text() + "\nNEW = 1\n")
    after = digests(scripts)
    changed = {name for name in before if after[name] != before[name]}
    assert "score" in changed
    assert changed.isdisjoint({"fetch", "environment", "samples", "serve_config", "generate", "reference", "judge"})


def test_an_edited_client_changes_plan_and_generate_and_not_score(scripts):
    before = digests(scripts)
    path = scripts / "assay/client/openai.py"
    path.write_text(path.read_text() + "\nNEW = 1\n")
    after = digests(scripts)
    assert {name for name in before if after[name] != before[name]} == {"serve_config", "generate"}


def test_a_stage_that_picks_by_modality_counts_that_modality_alone(scripts):
    score = scripts / "scripts/score.py"
    (scripts / "assay/metrics/other.py").write_text("OLD = 1\n")
    (scripts / "assay/scoring/asr.py").write_text("from assay.metrics import other\n")
    picking = scripts / "assay/score.py"
    picking.write_text(picking.read_text().replace("import text\n", "import asr, text\n", 1))

    def of(modality):
        forget()
        return module.fingerprint(score, modality)

    before = {modality: of(modality) for modality in ("text", "asr", None)}
    (scripts / "assay/metrics/other.py").write_text("NEW = 1\n")
    assert {modality for modality in before if of(modality) != before[modality]} == {"asr", None}
    before = {modality: of(modality) for modality in ("text", "asr", None)}
    path = scripts / "assay/scoring/text.py"
    path.write_text(path.read_text() + "\nNEW = 1\n")
    assert {modality for modality in before if of(modality) != before[modality]} == {"text", None}
