"""A task that needs no data set: the last word of a sentence, among words that end others of the same file.

Sentences are of held-out files. A question is right if its own word is the likeliest of four, by the summed
log-likelihood of the word and the full stop.
"""

import functools
import hashlib
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.converge.corpus import END_OF_DOCUMENT

CANDIDATES = 4
# tokens of a question, and questions in a pass
LENGTH, BATCH = 64, 32
# what comments begin lines with
MARK = re.compile(r"(?m)^[ \t]*(?:#+:?|//+|\*+)(?=[ \t])")
# five words or more, with names of code among them, and a last one of three letters or more
BEGIN = r"(?:^|(?<=[.!?:] )|(?<=\"))"
WORDS = r"[A-Z][a-z]*(?:,? [\w'`()/<>=.:-]*\w[)`']*){4,30}"
SENTENCE = re.compile(rf"{BEGIN}({WORDS}),? ([a-z]{{3,}})\.(?= |$)")


class Question(NamedTuple):
    sentence: str
    """Without its last word."""
    candidates: tuple[str, ...]
    """The first one is right."""


class Rows(NamedTuple):
    """Questions as token ids: `CANDIDATES` rows each, int64 [rows, LENGTH]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    counts: torch.Tensor
    """Where labels are of a candidate."""


def sentences(text: str) -> list[tuple[str, str]]:
    """Sentences of a file, each with its last word apart."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", MARK.sub("", text)))
    return [match.groups() for part in paragraphs for match in SENTENCE.finditer(part)]


def questions_of(texts: Iterator[str]) -> list[Question]:
    """One question of each sentence, in the order of the sentences' hashes."""
    found: dict[bytes, Question] = {}
    for text in texts:
        pairs = sentences(text)
        words = sorted({word for _, word in pairs})
        for sentence, word in pairs:
            others = [other for other in words if other != word]
            if len(others) < CANDIDATES - 1:
                continue
            digest = hashlib.sha256(f"{sentence} {word}".encode()).digest()
            drawn = random.Random(digest).sample(others, CANDIDATES - 1)
            found.setdefault(digest, Question(sentence, (word, *drawn)))
    return [found[digest] for digest in sorted(found)]


@functools.cache
def rows_of(data: Path, count: int) -> Rows:
    """The first questions of the held-out files that `corpus.prepare` put into `data`.

    Those of more tokens than LENGTH are left out. Raises ValueError if there are none.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(data / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    ids, lengths = np.load(data / "held_out.npy"), np.load(data / "held_out_lengths.npy")
    # without the end of the document
    parts = (ids[last - length : last - 1] for last, length in zip(np.cumsum(lengths), lengths, strict=True))
    made: list[tuple[list[int], int]] = []
    for question in questions_of(tokenizer.decode(part.tolist()) for part in parts):
        texts = [question.sentence, *(f" {word}." for word in question.candidates)]
        first, *rest = (one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False))
        if 1 + len(first) + max(map(len, rest)) <= LENGTH:
            made += [([end, *first, *one], 1 + len(first)) for one in rest]
        if len(made) == count * CANDIDATES:
            break
    if not made:
        raise ValueError(f"{data}: no sentences of prose in the held-out files: give more with --text")
    tokens = torch.full((len(made), LENGTH + 1), end)
    counts = torch.zeros(len(made), LENGTH, dtype=torch.bool)
    for row, (own, start) in enumerate(made):
        tokens[row, : len(own)] = torch.tensor(own)
        counts[row, start - 1 : len(own) - 1] = True
    return Rows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), counts)


def accuracy(model: torch.nn.Module, rows: Rows) -> float:
    """The share of right answers of a model that is called as Megatron's GPTModel."""
    device = next(model.parameters()).device
    right = []
    for batch in zip(*(part.split(BATCH * CANDIDATES) for part in rows), strict=True):
        tokens, labels, counts = (part.to(device) for part in batch)
        positions = torch.arange(LENGTH, device=device).expand_as(tokens)
        losses = model(tokens, positions, None, labels=labels)
        right.append((losses * counts).sum(1).view(-1, CANDIDATES).argmin(1) == 0)
    return torch.cat(right).float().mean().item()
