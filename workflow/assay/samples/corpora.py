"""The text that prompts are made of, read from fetched sources."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from assay.errors import SampleError

# Subjects and single questions about sex, abuse or slaughter: nothing to greet an engineer with.
_UNSUITABLE = {"human_sexuality", "moral_disputes", "moral_scenarios"}
_UNSUITABLE |= {
    "security_studies-1",
    "security_studies-2",
    "high_school_us_history-2",
    "high_school_us_history-3",
    "high_school_world_history-3",
}
_QUESTION = re.compile(r"^Q: (.*?)\n(\(A\) .*?)\nA: (.*?)(?=\n\nQ: |\Z)", re.DOTALL | re.MULTILINE)
_PASSAGE = "This question refers to the following information.\n"
_MESSAGE = re.compile(r'^msgid ((?:".*"\n)+)msgstr ((?:".*"(?:\n|\Z))+)', re.MULTILINE)


@dataclass(frozen=True)
class Question:
    """A multiple-choice question with its worked answer (MMLU)."""

    subject: str
    number: int
    stem: str
    options: str
    answer: str

    @property
    def key(self) -> str:
        """Subject and number."""
        return f"{self.subject}-{self.number}"

    @property
    def passage(self) -> str | None:
        """The historical text that the question refers to, without the question itself, if there is one."""
        if not self.stem.startswith(_PASSAGE):
            return None
        return self.stem.removeprefix(_PASSAGE).rpartition("\n")[0].strip('\n "“')


@dataclass(frozen=True)
class Function:
    """A documented Python function."""

    module: str
    name: str
    source: str
    head: str  # up to the end of the docstring
    summary: str  # first paragraph of the docstring, on one line


@dataclass(frozen=True)
class Message:
    """A sentence of an interface and its translation."""

    english: str
    text: str


@cache
def questions(directory: Path) -> tuple[Question, ...]:
    """The MMLU worked examples of source `lm_eval`."""
    file = _existing(directory / "lm_eval/tasks/mmlu/flan_cot_fewshot/_cot_prompts.json")
    subjects: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    found = (
        Question(subject, number, stem.strip(), options.strip(), _plain(answer))
        for subject, text in sorted(subjects.items())
        for number, (stem, options, answer) in enumerate(_QUESTION.findall(text), 1)
    )
    return tuple(item for item in found if not {item.subject, item.key} & _UNSUITABLE)


def _plain(answer: str) -> str:
    """A worked answer without the phrases that every one of them begins with."""
    start = r"(?:Let[’']s think step by step\.|We refer to Wikipedia[^.]* for help\.|Let[’']s solve [^.]*\.)\s*"
    return re.sub(rf"^(?:{start})+", "", answer.strip()).strip()


@cache
def problems(directory: Path) -> tuple[str, ...]:
    """The GSM8K word problems of source `lm_eval`, one line each."""
    file = _existing(directory / "lm_eval/tasks/gsm8k/gsm8k-cot.yaml")
    samples = yaml.safe_load(file.read_text(encoding="utf-8"))["fewshot_config"]["samples"]
    return tuple(" ".join(sample["question"].split()) for sample in samples)


@cache
def functions(directory: Path) -> tuple[Function, ...]:
    """The public functions with a docstring of source `more_itertools`."""
    found = []
    for module in ("more", "recipes"):
        text = _existing(directory / "more_itertools" / f"{module}.py").read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            docstring = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if isinstance(node, ast.FunctionDef) and docstring and not node.name.startswith("_"):
                start, end = node.lineno - 1, node.end_lineno
                head = "\n".join(lines[start : node.body[0].end_lineno])
                summary = " ".join(docstring.split("\n\n")[0].split())
                found.append(Function(module, node.name, "\n".join(lines[start:end]), head, summary))
    return tuple(found)


@cache
def messages(directory: Path, language: str) -> tuple[Message, ...]:
    """Whole sentences (without placeholders or markup) of source `django` in one language, each English one once."""
    found: dict[str, str] = {}
    files = sorted(directory.glob(f"django/**/locale/{language}/LC_MESSAGES/django.po"))
    for file in files:
        for block in file.read_text(encoding="utf-8").split("\n\n"):
            message = _message(block)
            if message is not None:
                found.setdefault(message.english, message.text)
    if not found:
        raise SampleError(f"{directory} holds no message catalogue for '{language}'")
    return tuple(Message(english, text) for english, text in sorted(found.items()))


def _message(block: str) -> Message | None:
    match = _MESSAGE.search(block)
    if match is None or "#, fuzzy" in block or "msgctxt" in block:
        return None
    # A catalogue quotes strings as Python does, and joins adjacent ones as Python does.
    english, text = (ast.literal_eval(f"({quoted})") for quoted in match.groups())
    whole = len(english.split()) >= 6 and english.endswith((".", "?", "!")) and text.strip() == text
    return Message(english, text) if whole and text and not re.search(r"[%{}<>\n]", english + text) else None


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise SampleError(f"{file} does not exist; fetch the recipe's `sources`")
    return file
