"""The corpus: finds its documents and holds some of them out for validation."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coat_launch.errors import LaunchError
from coat_launch.split import Split, hold_out
from coat_launch.text import Tokenizer, read_documents, standard_library, tokenise


class Corpus(NamedTuple):
    train: Split
    validation: Split
    vocab_size: int


def load_corpus(
    paths: Sequence[str | os.PathLike] = (),
    *,
    seq_length: int,
    seed: int,
    tokenizer: str | os.PathLike | None = None,
    validation_share: float = 0.05,
) -> Corpus:
    """Reads the corpus and holds a part of it out for validation.

    Args:
        paths: text files, `.jsonl` files with a "text" in each line, folders of both. Without any, the Python
            standard library's source files.
        seq_length: tokens per sample.
        seed: decides which documents are held out and the order of the samples.
        tokenizer: a Hugging Face `tokenizer.json`; text is tokenised by bytes without it.
        validation_share: fraction of the tokens to hold out, in whole documents.

    Raises LaunchError for every input that cannot be used.
    """
    text_tokenizer = Tokenizer.from_file(tokenizer) if tokenizer is not None else Tokenizer.bytes()
    files = _files_of(map(Path, paths)) if paths else standard_library()
    tokens, lengths = tokenise(read_documents(files), text_tokenizer)
    if not len(lengths):
        where = ", ".join(map(str, paths)) or "the standard library"
        raise LaunchError(f"--data {where}: no usable text: every document is empty")
    documents = np.stack([np.cumsum(lengths) - lengths, lengths], 1)
    splits = []
    for name, part in zip(
        ("training", "validation"), hold_out(documents, validation_share, seed, seq_length), strict=True
    ):
        split = Split(tokens, part, seq_length=seq_length, seed=seed)
        if not len(split):
            raise LaunchError(
                f"the {name} part of the corpus has {split.num_tokens} tokens, less than one sequence of "
                f"{seq_length} and its label: give more data or a smaller --seq-length"
            )
        splits.append(split)
    return Corpus(*splits, text_tokenizer.vocab_size)


def padded_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """The smallest multiple that holds all ids: FP8 GEMMs need round sizes."""
    return -(-vocab_size // multiple) * multiple


def _files_of(paths: Iterable[Path]) -> list[Path]:
    """Text files in the order given, folders sorted, without hidden files."""
    found = []
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        files = [p for p in inside if p.is_file() and not _hidden(p.relative_to(path))]
        if not files:
            raise LaunchError(f"--data {path}: no such file, or a folder without files. Correct the path")
        found += files
    return found


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
