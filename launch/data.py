"""Text, or token ids, to batches.

Documents are laid end to end and cut into sequences; every epoch visits all sequences once, in an order that
depends on the seed alone. A batch is a pure function of how many samples were consumed before it, so a run
resumes from that one number and sees the same data on any number of data-parallel ranks.

Token ids stay in memory maps: text is tokenised once, block by block, into an unnamed temporary file, and
Megatron's indexed datasets are read where they lie. Every process tokenises for itself, so a corpus of many
gigabytes belongs into the indexed format.
"""

import json
import os
import re
import struct
import sysconfig
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

_BLOCK_BYTES = 1 << 20
_STDLIB_BYTES = 4 << 20
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_INDEXED = (".idx", ".bin")
# Megatron's: a constant, a version, a code of the tokens' type, numbers of sequences and of documents
_INDEX_HEADER = struct.Struct("<9sQBQQ")
_INDEX_KIND = (b"MMIDIDX\0\0", 1)
# escapes of JSON that are no characters by themselves
_HALVES = re.compile("[\ud800-\udfff]")
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")


class DataError(ValueError):
    """The data given cannot be trained on; the message names the file and the way out."""


class Batch(NamedTuple):
    """All int64, on the CPU, of shape [batch, sequence]; `labels` is `tokens` one position further."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """`encode` gives the ids of a text as an integer array; `end_of_document` follows each document."""

    encode: Callable[[str], np.ndarray]
    vocab_size: int
    end_of_document: int

    @classmethod
    def bytes(cls) -> "Tokenizer":
        """Ids 0 to 255 are the bytes of UTF-8, 256 ends a document."""
        return cls(lambda text: np.frombuffer(text.encode(), np.uint8), 257, 256)

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads a Hugging Face `tokenizer.json`. Raises DataError if it is missing or no tokenizer."""
        if not Path(path).is_file():
            raise DataError(f"--tokenizer {path}: no such file; expected a Hugging Face tokenizer.json")
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # the library raises plain Exception
        except Exception as error:
            raise DataError(f"--tokenizer {path}: not a Hugging Face tokenizer.json ({error})") from error
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        known = (tokenizer.token_to_id(token) for token in _END_OF_DOCUMENT)
        end = next((token for token in known if token is not None), None)
        # ids may have gaps, so the size alone does not bound them
        size = max(size, 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1))
        if end is None:
            end, size = size, size + 1

        def encode(text: str) -> np.ndarray:
            return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

        return cls(encode, size, end)


class Split:
    """Documents of one part of the corpus, laid end to end and cut into samples of `seq_length + 1` tokens.

    Neighbouring samples share one token, so that each token is a label once.
    """

    def __init__(self, sources, documents: np.ndarray, *, seq_length: int, vocab_size: int, seed: int):
        """`documents` is int64 [n, 3]: which of `sources`, first token, number of tokens."""
        self._sources = sources
        self._documents = documents
        self._ends = np.cumsum(documents[:, 2])
        self._seq_length, self._vocab_size, self._seed = seq_length, vocab_size, seed
        self._order = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        """Number of samples in one epoch."""
        return max(0, (self.num_tokens - 1) // self._seq_length)

    @property
    def num_tokens(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def sample(self, index: int) -> np.ndarray:
        """Tokens of the sample at `index`, in the order of the documents: int64 [seq_length + 1]."""
        out, pieces = np.empty(self._seq_length + 1, np.int64), []
        position, filled = index * self._seq_length, 0
        document = int(np.searchsorted(self._ends, position, side="right"))
        while filled < len(out):
            source, start, length = self._documents[document]
            inside = position + filled - (self._ends[document] - length)
            count = min(int(length - inside), len(out) - filled)
            out[filled : filled + count] = self._sources[source][start + inside : start + inside + count]
            pieces.append((filled, self._sources[source], start + inside))
            filled, document = filled + count, document + 1
        if out.max() >= self._vocab_size or out.min() < 0:
            bad = int(np.flatnonzero((out < 0) | (out >= self._vocab_size))[0])
            begin, source, first = next(piece for piece in reversed(pieces) if piece[0] <= bad)
            # tokenised text has no ids but the tokenizer's
            raise DataError(
                f"--data {source.prefix}, token {first + bad - begin}: token id {out[bad]}, but the "
                f"vocabulary has {self._vocab_size} ids: give the tokenizer the data was made with "
                "(--tokenizer), or its size (--vocab-size)"
            )
        return out

    def batch(self, positions: Iterable[int]) -> Batch:
        """The samples at these places of the endless shuffled sequence of epochs."""
        tokens = torch.from_numpy(np.stack([self.sample(self._shuffled(p)) for p in positions]))
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        position_ids = torch.arange(self._seq_length).expand_as(inputs).contiguous()
        return Batch(inputs, labels, torch.ones_like(inputs), position_ids)

    def micro_batches(
        self, consumed: int, *, global_batch_size: int, micro_batch_size: int, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        """This rank's share of the global batch that follows `consumed` samples.

        The global batch is the samples `consumed` to `consumed + global_batch_size`, whatever the number of
        ranks; sample i of it belongs to rank i % ranks.
        """
        if global_batch_size % (micro_batch_size * ranks):
            raise DataError(
                f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size "
                f"{micro_batch_size} times {ranks} data-parallel ranks"
            )
        mine = range(consumed + rank, consumed + global_batch_size, ranks)
        for first in range(0, len(mine), micro_batch_size):
            yield self.batch(mine[first : first + micro_batch_size])

    def _shuffled(self, position: int) -> int:
        epoch, place = divmod(position, len(self))
        if self._order[0] != epoch:
            order = np.arange(len(self), dtype=np.uint32 if len(self) < 2**32 else np.int64)
            np.random.default_rng([self._seed, epoch]).shuffle(order)
            self._order = (epoch, order)
        return int(self._order[1][place])


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

    Raises DataError for every input that cannot be used.
    """
    text_tokenizer = Tokenizer.from_file(tokenizer) if tokenizer is not None else Tokenizer.bytes()
    if paths:
        texts, prefixes = _find_sources([Path(p) for p in paths])
    else:
        texts, prefixes = _standard_library(), []
    known_size = text_tokenizer.vocab_size if texts or tokenizer is not None else None
    if texts and prefixes and tokenizer is None:
        raise DataError(
            f"--data mixes text ({texts[0]}) with token ids ({prefixes[0]}): "
            "give the tokenizer the ids were made with (--tokenizer)"
        )
    if known_size is None and vocab_size is None:
        raise DataError(
            f"{prefixes[0]}: an indexed dataset does not say how many ids it uses: "
            "give --tokenizer or --vocab-size"
        )
    if known_size is not None and vocab_size is not None and vocab_size < known_size:
        raise DataError(f"--vocab-size {vocab_size} is less than the {known_size} ids of the tokenizer")

    sources, tables = [], []
    if texts:
        tokens, lengths = _tokenise(_read_documents(texts), text_tokenizer)
        sources.append(tokens)
        tables.append(_table(0, np.cumsum(lengths) - lengths, lengths))
    for prefix in prefixes:
        tokens, starts, lengths = _read_indexed(prefix)
        tables.append(_table(len(sources), starts, lengths))
        sources.append(tokens)
    table = np.concatenate(tables)
    if not len(table):
        where = ", ".join(map(str, paths)) or "the standard library"
        raise DataError(f"--data {where}: no usable text: every document is empty")

    train, validation = _hold_out(table, validation_share, seed, seq_length)
    size = vocab_size if vocab_size is not None else known_size
    splits = []
    for name, part in (("training", train), ("validation", validation)):
        split = Split(sources, part, seq_length=seq_length, vocab_size=size, seed=seed)
        if not len(split):
            raise DataError(
                f"the {name} part of the corpus has {split.num_tokens} tokens, less than one sequence of "
                f"{seq_length} and its label: give more data or a smaller --seq-length"
            )
        splits.append(split)
    return Corpus(*splits, size)


def padded_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """The smallest multiple that holds all ids: FP8 GEMMs and tensor parallelism need round sizes."""
    return -(-vocab_size // multiple) * multiple


def _standard_library() -> list[Path]:
    """The standard library's sources, sorted, as many as fit into a few megabytes."""
    root = Path(sysconfig.get_path("stdlib"))
    chosen, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if _STDLIB_SKIPPED.isdisjoint(path.relative_to(root).parts):
            total += path.stat().st_size
            if total > _STDLIB_BYTES:
                break
            chosen.append(path)
    if not chosen:
        raise DataError(f"{root} holds no Python sources to train on: give text with --data")
    return chosen


def _find_sources(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Text files and prefixes of indexed datasets, in the order given, folders sorted."""
    texts, prefixes = [], []
    for path in paths:
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p.relative_to(path))]
            found = [p for p in inside if p.stat().st_size]
            if not found:
                raise DataError(f"--data {path}: the folder holds no file with text")
            prefixes += sorted({p.with_suffix("") for p in found if p.suffix in _INDEXED})
            texts += [p for p in found if p.suffix not in _INDEXED]
        elif path.suffix in _INDEXED:
            prefixes.append(path.with_suffix(""))
        elif path.is_file():
            if not path.stat().st_size:
                raise DataError(f"--data {path}: the file is empty")
            texts.append(path)
        elif _with(path, ".idx").exists() or _with(path, ".bin").exists():
            prefixes.append(path)
        else:
            raise DataError(f"--data {path}: no such file, folder or indexed dataset")
    return texts, prefixes


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _with(prefix: Path, suffix: str) -> Path:
    """The prefix may itself hold dots, so this is not `with_suffix`."""
    return prefix.with_name(prefix.name + suffix)


def _read_documents(paths: Iterable[Path]) -> Iterator[Iterator[str]]:
    """One iterator of text blocks for each document."""
    for path in paths:
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path)
        else:
            yield _read_text(path)


def _read_text(path: Path) -> Iterator[str]:
    """Blocks that end at a line's end, so that no character and hardly ever a token is cut."""
    offset = 0
    with _open(path) as file:
        while block := file.read(_BLOCK_BYTES):
            block += file.readline()
            yield _decode(block, path, offset)
            offset += len(block)


def _read_jsonl(path: Path) -> Iterator[Iterator[str]]:
    offset = 0
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            text = _decode(line, path, offset)
            offset += len(line)
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            # of objects in objects without end, and of integers of thousands of digits
            except (ValueError, RecursionError) as error:
                why = (
                    f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                )
                raise DataError(
                    f'{path}, line {number}: not JSON ({why}); expected one {{"text": "..."}} on each line, '
                    f"found {text.strip()[:60]!r}"
                ) from error
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise DataError(
                    f'{path}, line {number}: expected an object with a string under "text", '
                    f"found {text.strip()[:60]!r}"
                )
            if "\\u" in text and (half := _HALVES.search(record["text"])):
                raise DataError(
                    f'{path}, line {number}: "text" has half a character, \\u{ord(half[0]):04x}, at '
                    f"{half.start()}; write such characters as both halves, or leave the line out"
                )
            yield iter((record["text"],))


def _open(path: Path):
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _decode(block: bytes, path: Path, offset: int) -> str:
    try:
        return block.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 at byte {offset + error.start} (0x{block[error.start]:02x}): "
            "convert the file, or leave it out of --data"
        ) from error


def _tokenise(documents: Iterable[Iterator[str]], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all non-empty documents end to end, memory-mapped, and the documents' lengths, int64."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    end, lengths = np.array([tokenizer.end_of_document], dtype), array("q")
    try:
        with tempfile.TemporaryFile() as file:
            for blocks in documents:
                length = 0
                for block in blocks:
                    ids = tokenizer.encode(block).astype(dtype)
                    length += len(ids)
                    file.write(ids.tobytes())
                if length:
                    file.write(end.tobytes())
                    lengths.append(length + 1)
            file.flush()
            tokens = np.memmap(file, dtype, mode="r") if lengths else np.empty(0, dtype)
    except OSError as error:
        raise DataError(
            f"cannot keep the tokenised text in {tempfile.gettempdir()} ({error.strerror}): "
            "make room there, or set TMPDIR to another folder"
        ) from error
    return tokens, np.array(lengths, np.int64)


class _IndexedTokens:
    """All tokens of a Megatron indexed dataset as one array that is read slice by slice."""

    def __init__(self, prefix: Path, dataset):
        # the memory map lives as long as the dataset, so slices are read through it
        self.prefix, self._dataset, self.dtype = prefix, dataset, np.dtype(dataset.index.dtype)

    def __getitem__(self, part: slice) -> np.ndarray:
        offset, count = int(part.start) * self.dtype.itemsize, int(part.stop - part.start)
        return self._dataset.bin_reader.read(self.dtype, count, offset)


def _read_indexed(prefix: Path) -> tuple[_IndexedTokens, np.ndarray, np.ndarray]:
    """Tokens, and the start and length of each document, int64."""
    for suffix, other in (_INDEXED, _INDEXED[::-1]):
        if not _with(prefix, suffix).is_file():
            raise DataError(
                f"--data {prefix}: {_with(prefix, suffix)} is missing; an indexed dataset is this file and "
                f"{_with(prefix, other).name}, as Megatron's tools/preprocess_data.py writes them"
            )
        if not _with(prefix, suffix).stat().st_size:
            raise DataError(f"--data {prefix}: {_with(prefix, suffix)} is empty")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dtype, edges = _read_index(_with(prefix, ".idx"))
    expected, found = int(edges[-1]) * dtype.itemsize, _with(prefix, ".bin").stat().st_size
    if found != expected:
        raise DataError(
            f"--data {prefix}: the index names {expected} bytes of tokens, the .bin file has {found}: one of "
            "them was cut short or belongs to another dataset; make the dataset again"
        )
    return _IndexedTokens(prefix, IndexedDataset(str(prefix))), edges[:-1], np.diff(edges)


def _read_index(index: Path) -> tuple[np.dtype, np.ndarray]:
    """Type of the tokens; first tokens of all documents and the end of the last, int64 [documents + 1].

    Raises DataError for an .idx of another kind, not as long as its own header says, or whose sequences and
    documents do not lie end to end: Megatron's reader would train on whatever such ranges hold.
    """
    from megatron.core.datasets.indexed_dataset import DType

    def refuse(why: str):
        raise DataError(f"--data {index}: {why}; make the dataset again")

    with _open(index) as file:
        header, size = file.read(_INDEX_HEADER.size), index.stat().st_size
    constant, version, code, sequences, starts = _INDEX_HEADER.unpack(header.ljust(_INDEX_HEADER.size, b"\0"))
    if (constant, version) != _INDEX_KIND:
        refuse(f"not a readable Megatron indexed dataset (bad header: it begins with {header[:17]!r})")
    # lengths of sequences in four bytes, where they and where documents begin in eight
    expected = _INDEX_HEADER.size + (4 + 8) * sequences + 8 * starts
    if size != expected:
        refuse(f"it has {size} bytes, but its header asks for {expected}: it was cut short or damaged")
    try:
        dtype = np.dtype(DType.dtype_from_code(code))
    except ValueError:
        refuse(f"its header has {code} for the type of the tokens, which stands for none")
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


def _table(source: int, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows for `Split` of the documents that are not empty."""
    return np.stack([np.full_like(starts, source), starts, lengths], 1)[lengths > 0]


def _hold_out(
    documents: np.ndarray, share: float, seed: int, seq_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation documents, each in the original order.

    In an order drawn from the seed, documents go to the validation part until it has its share of the tokens
    and at least one sequence. A lone document is cut in two instead.
    """
    lengths = documents[:, 2]
    total = int(lengths.sum())
    wanted = max(int(total * share), seq_length + 1)
    if len(documents) == 1:
        source, start, length = documents[0]
        kept = max(0, length - wanted)
        return np.array([[source, start, kept]]), np.array([[source, start + kept, length - kept]])

    order = np.random.default_rng(seed).permutation(len(documents))
    # a document that is most of the corpus would leave nothing to train on
    order = order[np.argsort(lengths[order] * 2 > total, kind="stable")]
    count = 1 + int(np.searchsorted(np.cumsum(lengths[order]), wanted))
    held = np.zeros(len(documents), bool)
    held[order[: min(count, len(documents) - 1)]] = True
    return documents[~held], documents[held]
