"""Megatron's indexed datasets, read in place from disk."""

from pathlib import Path

import numpy as np

from coat_launch.errors import LaunchError

SUFFIXES = (".idx", ".bin")


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
