"""Megatron's indexed datasets, read in place from disk."""

import struct
from pathlib import Path

import numpy as np

from coat_launch.errors import DataError
from coat_launch.text import open_file

SUFFIXES = (".idx", ".bin")
# Megatron's: a constant, a version, a code of the tokens' type, numbers of sequences and of documents
_INDEX_HEADER = struct.Struct("<9sQBQQ")
_INDEX_KIND = (b"MMIDIDX\0\0", 1)


def file_of(prefix: Path, suffix: str) -> Path:
    """The prefix may itself hold dots, so this is not its `with_suffix`."""
    return prefix.with_name(prefix.name + suffix)


class _IndexedTokens:
    """All tokens of a Megatron indexed dataset as one array that is read slice by slice."""

    def __init__(self, prefix: Path, dataset):
        # the memory map lives as long as the dataset, so slices are read through it
        self.prefix, self._dataset, self.dtype = prefix, dataset, np.dtype(dataset.index.dtype)

    def __getitem__(self, part: slice) -> np.ndarray:
        offset, count = int(part.start) * self.dtype.itemsize, int(part.stop - part.start)
        return self._dataset.bin_reader.read(self.dtype, count, offset)


def read_indexed(prefix: Path) -> tuple[_IndexedTokens, np.ndarray, np.ndarray]:
    """Tokens, and the start and length of each document, int64."""
    for suffix, other in (SUFFIXES, SUFFIXES[::-1]):
        if not file_of(prefix, suffix).is_file():
            raise DataError(
                f"--data {prefix}: {file_of(prefix, suffix)} is missing; an indexed dataset is this file and "
                f"{file_of(prefix, other).name}, as Megatron's tools/preprocess_data.py writes them"
            )
        if not file_of(prefix, suffix).stat().st_size:
            raise DataError(f"--data {prefix}: {file_of(prefix, suffix)} is empty")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dtype, edges = _read_index(file_of(prefix, ".idx"))
    expected, found = int(edges[-1]) * dtype.itemsize, file_of(prefix, ".bin").stat().st_size
    if found != expected:
        raise DataError(
            f"--data {prefix}: the index names {expected} bytes of tokens, the .bin file has {found}: one of "
            "them was cut short or belongs to another dataset; make the dataset again"
        )
    return _IndexedTokens(prefix, IndexedDataset(str(prefix))), edges[:-1], np.diff(edges)


def _read_index(index: Path) -> tuple[np.dtype, np.ndarray]:
    """Type of the tokens; first tokens of all documents and the end of the last, int64 [documents + 1].

    Raises DataError for an .idx of another kind, for a length other than in its header, or if sequences and
    documents do not lie end to end: Megatron's reader would train on arbitrary tokens.
    """
    from megatron.core.datasets.indexed_dataset import DType

    def refuse(why: str):
        raise DataError(f"--data {index}: {why}; make the dataset again")

    with open_file(index) as file:
        header, size = file.read(_INDEX_HEADER.size), index.stat().st_size
    constant, version, code, sequences, starts = _INDEX_HEADER.unpack(header.ljust(_INDEX_HEADER.size, b"\0"))
    if (constant, version) != _INDEX_KIND:
        refuse(f"not a readable Megatron indexed dataset (bad header: it begins with {header[:17]!r})")
    # lengths of sequences in four bytes, starts of sequences and of documents in eight
    expected = _INDEX_HEADER.size + (4 + 8) * sequences + 8 * starts
    if size != expected:
        refuse(f"it has {size} bytes, but its header needs {expected}: it was cut short or damaged")
    try:
        dtype = np.dtype(DType.dtype_from_code(code))
    except ValueError:
        refuse(f"its header has {code} for the type of the tokens, which is not a known type")
    if not np.issubdtype(dtype, np.integer):
        refuse(f"expected integer token ids, found {dtype}")

    stored = np.memmap(index, mode="r")
    lengths = np.frombuffer(stored, np.int32, sequences, _INDEX_HEADER.size)
    begins = np.frombuffer(stored, np.int64, sequences, _INDEX_HEADER.size + 4 * sequences)
    documents = np.frombuffer(stored, np.int64, starts, _INDEX_HEADER.size + 12 * sequences)
    if len(negative := np.flatnonzero(lengths < 0)):
        refuse(f"sequence {negative[0]} has {lengths[negative[0]]} tokens")
    edges = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if len(wrong := np.flatnonzero(begins != edges[:-1] * dtype.itemsize)):
        at = wrong[0]
        refuse(f"sequence {at} begins at byte {begins[at]} instead of {edges[at] * dtype.itemsize}")
    ordered = starts and documents[0] == 0 and documents[-1] == sequences and (np.diff(documents) >= 0).all()
    if not ordered:
        shown = np.array2string(documents, threshold=8)
        refuse(f"expected documents of ascending sequences from 0 to {sequences}, found {shown}")
    return dtype, edges[documents]
