"""Small stand-ins for the fetched sources of sample sets, in the form of the real ones."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from assay.config import PypiSource
from assay.sources.manifest import make_manifest, write_manifest

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_resources(root: Path, extra_question: bool = False) -> Path:
    """`root` with `lm_eval`, `django`, `more_itertools` and `model` under it, as if fetched."""
    _lm_eval(root / "lm_eval", extra_question)
    _django(root / "django")
    _more_itertools(root / "more_itertools")
    _model(root / "model")
    for directory in root.iterdir():
        pin = PypiSource(
            kind="pypi", package=directory.name, version="1", sha256="0" * 64, files=["*"], licence="CC0-1.0"
        )
        write_manifest(make_manifest(directory.name, pin, directory), directory)
    return root


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _block(stem: str, answer: str) -> str:
    options = "(A) One (B) Two (C) Three (D) Four"
    return f"Q: {stem}\n{options}\nA: Let's think step by step. We refer to Wikipedia articles on it for help. {answer}"


def _subject(name: str, blocks: list[str]) -> str:
    return "\n\n".join([f"The following are multiple choice questions (with answers) about {name}.", *blocks])


def _lm_eval(directory: Path, extra_question: bool) -> None:
    stars = [
        _block(f"What is the name of star number {n}, and who found it?", f"Star number {n} was seen long ago. So (A).")
        for n in range(1, 13 + extra_question)
    ]
    passage = " ".join(f"In year {_word(n)} the people of the valley {_word(n + 7)} built a bridge." for n in range(40))
    prose = "This question refers to the following information.\n" + passage + "\nWhat did they build"
    texts = [_block(f"{prose} in valley {_word(n)}", "They built many a bridge. So (B).") for n in range(3)]
    subjects = {
        "astronomy": _subject("astronomy", stars),
        "high_school_world_history": _subject("world history", texts),
        "human_sexuality": _subject("human sexuality", [_block("Unfit?", "Unfit. (A).")]),
    }
    folder = directory / "lm_eval" / "tasks"
    _write(folder / "mmlu/flan_cot_fewshot/_cot_prompts.json", json.dumps(subjects))
    samples = [{"question": f"Ann has {n} pears and eats one.\n How many are left?", "target": "-"} for n in (3, 4, 5)]
    _write(folder / "gsm8k/gsm8k-cot.yaml", yaml.safe_dump({"fewshot_config": {"samples": samples}}))


def _word(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in str(number)) + "o"


def _django(directory: Path) -> None:
    catalogues = {
        "ja": ("これは最初の文です。", "これは二番目の文です。", "続きもあります。"),
        "ar": ("هذه هي الجملة الأولى.", "هذه هي الجملة الثانية. ", "ولها تتمة."),
    }
    for locale, (first, second, rest) in catalogues.items():
        text = (
            'msgid ""\nmsgstr ""\n"Language: x\\n"\n\n'
            f'#: a.py:1\nmsgid "This is the first of the sentences."\nmsgstr "{first}"\n\n'
            f'msgid ""\n"This is the second sentence, and "\n"it goes on."\nmsgstr ""\n"{second}"\n"{rest}"\n\n'
            '#, fuzzy\nmsgid "This one is only a guess of somebody."\nmsgstr "?"\n\n'
            '#, python-format\nmsgid "This one has %s in the middle of it."\nmsgstr "%s!"\n\n'
            'msgid "This one is not translated yet, sorry."\nmsgstr ""\n\n'
            'msgid "Too short."\nmsgstr "!"\n\n'
            'msgid "There is one of them in all here."\nmsgid_plural "There are more."\nmsgstr[0] "!"\n'
        )
        _write(directory / f"django/conf/locale/{locale}/LC_MESSAGES/django.po", text)


def _more_itertools(directory: Path) -> None:
    for module in ("more", "recipes"):
        parts = [
            f'def {module}_{n}(thing):\n    """Return item number {n}\n    of a thing.\n\n    Details.\n    """\n'
            f"    return thing[{n}]\n"
            for n in range(12)
        ]
        hidden = 'def _private():\n    """Hidden."""\n'
        _write(directory / f"more_itertools/{module}.py", "\n\n".join([*parts, hidden]))


def _model(directory: Path) -> None:
    """A tokenizer of bytes: one token a character of plain English."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(str(directory))
