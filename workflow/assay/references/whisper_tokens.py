"""The language that Whisper's decoder speaks: special tokens, timestamps, and the rules of what may follow what.

A window of up to 30 s is decoded to `<|0.00|> text <|2.40|><|2.40|> text <|5.00|>`: segments between timestamps. The
rules are those of the original decoder (github.com/openai/whisper, decoding.py and transcribe.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig

from assay.errors import SourceError
from assay.metrics.speech import Segment

STAMP_S = 0.02  # between timestamps
FRAME_S = 0.01  # between frames of the spectrogram
LATEST_START = 50  # timestamps: no window starts later than 1 s into its audio


@dataclass(frozen=True)
class Vocabulary:
    """Ids of a Whisper vocabulary. Timestamps are its last ids, from `first_stamp` on."""

    start: int
    end: int
    task: int
    no_timestamps: int
    no_speech: int
    first_stamp: int
    languages: dict[str, int]  # "en" -> id
    suppressed: tuple[int, ...]  # never said
    suppressed_first: tuple[int, ...]  # never said first

    @classmethod
    def of(cls, directory: str | Path) -> Vocabulary:
        """Read from the generation configuration of a transformers model.

        Raises:
            SourceError: it names no languages or tasks, as that of English-only weights.
        """
        config = GenerationConfig.from_pretrained(directory)
        if missing := [name for name in ("lang_to_id", "task_to_id") if not hasattr(config, name)]:
            raise SourceError(
                f"{Path(directory) / 'generation_config.json'} has no {' and no '.join(missing)}: these are weights "
                "of a Whisper for English alone, which is not judged here; name weights of a multilingual one"
            )
        return cls(
            start=config.decoder_start_token_id,
            end=config.eos_token_id,
            task=config.task_to_id["transcribe"],
            no_timestamps=config.no_timestamps_token_id,
            no_speech=config.no_timestamps_token_id - 1,
            first_stamp=config.no_timestamps_token_id + 1,
            languages={name.strip("<|>"): number for name, number in config.lang_to_id.items()},
            suppressed=tuple(config.suppress_tokens),
            suppressed_first=tuple(config.begin_suppress_tokens),
        )

    def is_stamp(self, token: int) -> bool:
        """Whether a token is a timestamp."""
        return token >= self.first_stamp

    def prompt(self, language: str, timestamps: bool = True) -> list[int]:
        """What a window's decoding starts from."""
        return [self.start, self.languages[language], self.task, *([] if timestamps else [self.no_timestamps])]

    def rule_out(self, logits: torch.Tensor, before: Sequence[int], timestamps: bool = True) -> torch.Tensor:
        """`logits` [vocabulary] with -inf for every token that may not follow `before` in a window.

        Timestamps come in pairs between texts, at the start alone, and never run backwards.
        """
        logits = logits.clone()
        logits[list(self.suppressed)] = -torch.inf
        if not before:
            logits[list(self.suppressed_first)] = -torch.inf
        if not timestamps:
            logits[self.first_stamp :] = -torch.inf
            return logits
        logits[self.no_timestamps] = -torch.inf
        stamps = [token for token in before if self.is_stamp(token)]
        if not before:
            logits[: self.first_stamp] = -torch.inf
            logits[self.first_stamp + LATEST_START + 1 :] = -torch.inf
        elif self.is_stamp(before[-1]):
            if len(before) == 1 or self.is_stamp(before[-2]):
                logits[self.first_stamp :] = -torch.inf
            else:
                logits[: self.end] = -torch.inf
                logits[self.first_stamp : before[-1]] = -torch.inf
        elif stamps:
            logits[self.first_stamp : stamps[-1] + 1] = -torch.inf
        return logits

    def stamps_first(self, logprobs: torch.Tensor) -> torch.Tensor:
        """`logprobs` [vocabulary] of what is chosen from: timestamps alone where they together beat every word."""
        stamps, others = logprobs[self.first_stamp :], logprobs[: self.first_stamp]
        if torch.logsumexp(stamps, -1) <= others.max():
            return logprobs
        return torch.cat([torch.full_like(others, -torch.inf), torch.log_softmax(stamps, -1)])

    def stamps_as_one(self, logprobs: torch.Tensor) -> torch.Tensor:
        """`logprobs` [..., vocabulary] with all timestamps as one last token.

        The decoder compares the same way: it goes on with a timestamp where all of them together are likelier than any
        one word. Which one hardly matters to the text.
        """
        stamps = torch.logsumexp(logprobs[..., self.first_stamp :], -1, keepdim=True)
        return torch.cat([logprobs[..., : self.first_stamp], stamps], -1)


@dataclass(frozen=True)
class Piece:
    """The tokens of one segment, timestamps included, with its times on the clip [s]."""

    tokens: tuple[int, ...]
    segment: Segment


@dataclass(frozen=True)
class Window:
    """What was decoded from the audio that starts at frame `seek`."""

    seek: int
    tokens: tuple[int, ...]


def cut(tokens: Sequence[int], first_stamp: int, seek: int, frames: int) -> tuple[list[Piece], int]:
    """A window's tokens as segments, and how many frames on the next window starts.

    What follows the last pair of timestamps was cut off by the window's end: the next window hears it again.

    Args:
        tokens: as decoded; the end token only where it follows text.
        first_stamp: id of timestamp 0.
        seek, frames: where the window starts and how much audio it has [frames].
    """
    stamps = [token >= first_stamp for token in tokens]
    whole = stamps[-2:] == [False, True]
    pairs = [place for place in range(1, len(tokens)) if stamps[place] and stamps[place - 1]]
    start = seek * FRAME_S
    if not pairs:
        spoken = [token - first_stamp for token, stamp in zip(tokens, stamps, strict=True) if stamp]
        seconds = spoken[-1] * STAMP_S if spoken and spoken[-1] else frames * FRAME_S
        return [Piece(tuple(tokens), Segment(start, start + seconds))], frames
    bounds = [0, *pairs, *([len(tokens)] if whole else [])]
    slices = [tuple(tokens[low:high]) for low, high in itertools.pairwise(bounds)]
    pieces = [
        Piece(part, Segment(*(start + (part[place] - first_stamp) * STAMP_S for place in (0, -1)))) for part in slices
    ]
    after = frames if whole else (tokens[pairs[-1] - 1] - first_stamp) * round(STAMP_S / FRAME_S)
    return pieces, after


def windows(tokens: Sequence[int], starts_s: Sequence[float], first_stamp: int) -> list[Window] | None:
    """The windows that a transcript's tokens were decoded from: a segment's start, less its timestamp, is its window's.

    Args:
        tokens: of all segments, timestamps included.
        starts_s: where each segment starts on the clip.
        first_stamp: id of timestamp 0.

    Returns:
        None where the tokens do not tell as many segments as there are starts.
    """
    pieces: list[list[int]] = []
    text = False  # whether the last token was text
    for place, token in enumerate(tokens):
        stamp = token >= first_stamp
        opens = not stamp and not text
        if opens and place and tokens[place - 1] >= first_stamp:
            if pieces:
                pieces[-1].pop()
            pieces.append([tokens[place - 1], token])
        elif opens:
            pieces.append([token])
        elif pieces:
            pieces[-1].append(token)
        text = not stamp
    if len(pieces) != len(starts_s):
        return None
    found: list[Window] = []
    for piece, start_s in zip(pieces, starts_s, strict=True):
        ahead = (piece[0] - first_stamp) * STAMP_S if piece[0] >= first_stamp else 0.0
        seek = round((start_s - ahead) / FRAME_S)
        if found and found[-1].seek == seek:
            found[-1] = Window(seek, (*found[-1].tokens, *piece))
        else:
            found.append(Window(seek, tuple(piece)))
    return found
