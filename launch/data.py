"""The corpus: finds its documents and holds some of them out for validation."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coat_launch.errors import LaunchError
from coat_launch.split import Split, document_table, hold_out
from coat_launch.text import Tokenizer, read_documents, standard_library, tokenise

# Megatron's indexed datasets
SUFFIXES = (".idx", ".bin")


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
    vocab_size: int | None = None,
    validation_share: float = 0.05,
) -> Corpus:
    """Reads the corpus and holds a part of it out for validation.

    Args:
        paths: text files, `.jsonl` files with a "text" in each line, folders of both, or Megatron indexed
            datasets (prefix, `.bin` or `.idx`). Without any, the Python standard library's source files.
        seq_length: tokens per sample.
        seed: decides which documents are held out and the order of the samples.
        tokenizer: a Hugging Face `tokenizer.json`; text is tokenised by bytes without it.
        vocab_size: number of ids, for indexed data without a tokenizer.
        validation_share: fraction of the tokens to hold out, in whole documents.

    Raises LaunchError for every input that cannot be used.
    """
    text_tokenizer = Tokenizer.from_file(tokenizer) if tokenizer is not None else Tokenizer.bytes()
    texts, prefixes = _find_sources([Path(p) for p in paths]) if paths else (standard_library(), [])
    size = _vocabulary_size(text_tokenizer if texts or tokenizer is not None else None, vocab_size)
    if texts and prefixes and tokenizer is None:
        raise LaunchError(
            f"--data mixes text ({texts[0]}) with token ids ({prefixes[0]}): "
            "give the tokenizer the ids were made with (--tokenizer)"
        )
    sources, tables = [], []
    if texts:
        tokens, lengths = tokenise(read_documents(texts), text_tokenizer)
        sources.append(tokens)
        tables.append(document_table(0, np.cumsum(lengths) - lengths, lengths))
    for prefix in prefixes:
        tokens, starts, lengths = read_indexed(prefix)
        tables.append(document_table(len(sources), starts, lengths))
        sources.append(tokens)
    table = np.concatenate(tables)
    if not len(table):
        where = ", ".join(map(str, paths)) or "the standard library"
        raise LaunchError(f"--data {where}: no usable text: every document is empty")

    train, validation = hold_out(table, validation_share, seed, seq_length)
    splits = []
    for name, part in (("training", train), ("validation", validation)):
        split = Split(sources, part, seq_length=seq_length, vocab_size=size, seed=seed)
        if not len(split):
            raise LaunchError(
                f"the {name} part of the corpus has {split.num_tokens} tokens, less than one sequence of "
                f"{seq_length} and its label: give more data or a smaller --seq-length"
            )
        splits.append(split)
    return Corpus(*splits, size)


def _vocabulary_size(tokenizer: Tokenizer | None, given: int | None) -> int:
    if tokenizer is None and given is None:
        raise LaunchError(
            "--data: an indexed dataset does not contain the number of ids: give the tokenizer that it was "
            "made with (--tokenizer), or the number (--vocab-size)"
        )
    if tokenizer is not None and given is not None and given < tokenizer.vocab_size:
        raise LaunchError(
            f"--vocab-size {given} is less than the {tokenizer.vocab_size} ids of the tokenizer"
        )
    return given if given is not None else tokenizer.vocab_size


def padded_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """The smallest multiple that holds all ids: FP8 GEMMs and tensor parallelism need round sizes."""
    return -(-vocab_size // multiple) * multiple


def _find_sources(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Text files and prefixes of indexed datasets, in the order given, folders sorted."""
    texts, prefixes = [], []
    for path in paths:
        files, found = [path], []
        if path.is_dir():
            files = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p.relative_to(path))]
        if not files:
            raise LaunchError(f"--data {path}: the folder holds no files")
        for file in files:
            if file.suffix in SUFFIXES:
                found.append(file.with_suffix(""))
            elif file.is_file():
                texts.append(file)
            elif file_of(file, ".idx").exists():
                found.append(file)
            else:
                raise LaunchError(f"--data {file}: no such file, folder or indexed dataset. Correct the path")
        # both files of a dataset are one
        prefixes += dict.fromkeys(found)
    return texts, prefixes


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def file_of(prefix: Path, suffix: str) -> Path:
    """The prefix may itself hold dots, so this is not its `with_suffix`."""
    return prefix.with_name(prefix.name + suffix)


def read_indexed(prefix: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, memory-mapped, and the start and length of each document, int64.

    Raises LaunchError for files that Megatron cannot read, and if sequences and documents do not lie end to
    end: Megatron's reader would train on arbitrary tokens.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    try:
        index = IndexedDataset(str(prefix)).index
        tokens = np.memmap(file_of(prefix, ".bin"), index.dtype, mode="r")
    except (AssertionError, OSError, ValueError, TypeError) as error:
        raise LaunchError(
            f"--data {prefix}: {' and '.join(file_of(prefix, s).name for s in SUFFIXES)} are not an indexed "
            f"dataset as Megatron's tools/preprocess_data.py writes it ({error}). Make it again"
        ) from error
    lengths, documents = index.sequence_lengths, index.document_indices
    edges = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    for part, sound in (
        ("integer tokens", np.issubdtype(index.dtype, np.integer)),
        ("sequences end to end", (lengths >= 0).all()),
        ("sequences end to end", (index.sequence_pointers == edges[:-1] * index.dtype().itemsize).all()),
        ("documents of ascending sequences", documents[0] == 0 and (np.diff(documents) >= 0).all()),
        ("documents of all sequences", documents[-1] == len(lengths)),
        (f"{edges[-1]} tokens in the .bin file", len(tokens) == edges[-1]),
    ):
        if not sound:
            raise LaunchError(
                f"--data {prefix}: the index is damaged, or belongs to another dataset: expected {part}. "
                "Make the dataset again"
            )
    return tokens, edges[documents[:-1]], np.diff(edges[documents])
