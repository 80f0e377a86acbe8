"""The corpus: text files to token ids. Some documents are held out for validation.

Every process tokenises for itself: train on a corpus of many gigabytes by Megatron-LM's own script.
"""

import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coat_launch.batches import Split, hold_out
from coat_launch.errors import LaunchError

_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")
# fraction of the tokens that is held out, in whole documents
VALIDATION_SHARE = 0.05
BLOCK_BYTES = 1 << 20
_STDLIB_BYTES = 4 << 20
# encodings: tables, and a batch that consists of tables would make the loss jump
_STDLIB_SKIPPED = {"encodings", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


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
) -> Corpus:
    """Reads the corpus and holds `VALIDATION_SHARE` of it out for validation.

    Args:
        paths: text files, `.jsonl` files with a "text" in each line, folders of both. Without any, the Python
            standard library's source files.
        seq_length: tokens per sample.
        seed: decides which documents are held out and the order of the samples.
        tokenizer: a Hugging Face `tokenizer.json`; text is tokenised by bytes without it.

    Raises LaunchError for every input that cannot be used.
    """
    text_tokenizer = Tokenizer.from_file(tokenizer) if tokenizer is not None else Tokenizer.bytes()
    files = _files_of(map(Path, paths)) if paths else _standard_library()
    try:
        tokens, lengths = tokenise(_documents(files), text_tokenizer)
    except OSError as error:
        raise LaunchError(
            f"--data {error.filename}: cannot be read ({error.strerror}). Set its permissions, or drop it"
        ) from error
    if not len(lengths):
        raise LaunchError(f"--data {', '.join(map(str, paths))}: no usable text: every document is empty")
    documents = np.stack([np.cumsum(lengths) - lengths, lengths], 1)
    splits = []
    for name, part in zip(
        ("training", "validation"), hold_out(documents, VALIDATION_SHARE, seed, seq_length), strict=True
    ):
        split = Split(tokens, part, seq_length=seq_length, seed=seed)
        if not len(split):
            raise LaunchError(
                f"the {name} part of the corpus has {split.num_tokens} tokens, less than one sequence of "
                f"{seq_length} and its label: give more data or a smaller --seq-length"
            )
        splits.append(split)
    return Corpus(*splits, text_tokenizer.vocab_size)


def padded_vocab_size(vocab_size: int) -> int:
    """The smallest multiple of 128 that holds all ids: FP8 GEMMs need round sizes."""
    return -(-vocab_size // 128) * 128


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """`encode` returns the ids of a text as an integer array; `end_of_document` follows each document."""

    encode: Callable[[str], np.ndarray]
    vocab_size: int
    end_of_document: int

    @classmethod
    def bytes(cls) -> "Tokenizer":
        """Ids 0 to 255 are the bytes of UTF-8, 256 ends a document."""
        return cls(lambda text: np.frombuffer(text.encode(), np.uint8), 257, 256)

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads a Hugging Face `tokenizer.json`. Raises LaunchError if it is missing or no tokenizer."""
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # the library raises plain Exception
        except Exception as error:
            raise LaunchError(f"--tokenizer {path}: not a Hugging Face tokenizer.json ({error})") from error
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        # ids may have gaps, so their number alone does not bound them
        size = max(len(vocabulary), 1 + max(vocabulary.values(), default=-1))
        end = next((vocabulary[token] for token in _END_OF_DOCUMENT if token in vocabulary), None)
        if end is None:
            end, size = size, size + 1

        def encode(text: str) -> np.ndarray:
            return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

        return cls(encode, size, end)


def tokenise(documents: Iterable[Iterable[str]], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all non-empty documents end to end, and the documents' lengths, int64."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    end, lengths = np.array([tokenizer.end_of_document], dtype), []
    parts = [end[:0]]
    for blocks in documents:
        ids = [tokenizer.encode(block).astype(dtype) for block in blocks]
        if length := sum(map(len, ids)):
            parts += [*ids, end]
            lengths.append(length + 1)
    return np.concatenate(parts), np.array(lengths, np.int64)


def _standard_library() -> list[Path]:
    """The standard library's sources, sorted, up to a total of a few megabytes."""
    root = Path(sysconfig.get_path("stdlib"))
    chosen, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if _STDLIB_SKIPPED.isdisjoint(path.relative_to(root).parts):
            total += path.stat().st_size
            if total > _STDLIB_BYTES:
                break
            chosen.append(path)
    if not chosen:
        raise LaunchError(f"{root} holds no Python sources to train on: give text with --data")
    return chosen


def _files_of(paths: Iterable[Path]) -> list[Path]:
    """Text files in the order given, folders sorted, without hidden files."""
    found = []
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        names = [p for p in inside if p.is_file() and not any(n[0] == "." for n in p.relative_to(path).parts)]
        if not names:
            raise LaunchError(f"--data {path}: no such file, or a folder without files. Correct the path")
        found += names
    return found


def _documents(paths: Iterable[Path]) -> Iterator[Iterable[str]]:
    """The blocks of text of each document."""
    for path in paths:
        if path.suffix == ".jsonl":
            yield from ([text] for text in _read_jsonl(path))
        else:
            yield _read_text(path)


def _read_text(path: Path) -> Iterator[str]:
    """Blocks of whole lines, so that hardly any token is split."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            while lines := file.readlines(BLOCK_BYTES):
                yield "".join(lines)
        except UnicodeDecodeError as error:
            raise LaunchError(
                f"{path}: not UTF-8 ({error}): convert the file, or leave it out of --data"
            ) from error


def _read_jsonl(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                # JSON can escape half of a character, which UTF-8 cannot hold
                text.encode()
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise LaunchError(
                    f'{path}, line {number}: expected {{"text": "..."}} in UTF-8, found {line[:60]!r} '
                    f"({error})"
                ) from error
            yield text
