"""Text files to token ids in a memory map: tokenised once, block by block, into an unnamed temporary file.

Every process tokenises for itself: train on a corpus of many gigabytes by Megatron-LM's own script.
"""

import json
import os
import sysconfig
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coat_launch.errors import LaunchError

_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")
BLOCK_BYTES = 1 << 20
_STDLIB_BYTES = 4 << 20
# encodings: tables, and a batch that consists of tables would make the loss jump
_STDLIB_SKIPPED = {"encodings", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


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


def standard_library() -> list[Path]:
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


def read_documents(paths: Iterable[Path]) -> Iterator[Iterator[str]]:
    """One iterator of text blocks for each document."""
    for path in paths:
        if path.suffix == ".jsonl":
            yield from (iter((text,)) for text in _read_jsonl(path))
        else:
            yield _read_text(path)


def _read_text(path: Path) -> Iterator[str]:
    """Blocks that end at a line's end, so that no character and hardly any token is split."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            block += file.readline()
            try:
                yield block.decode()
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


def tokenise(documents: Iterable[Iterator[str]], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
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
        raise LaunchError(
            f"--data: cannot be read, or its tokens not be kept in {tempfile.gettempdir()} ({error}). Set "
            "the permissions, make room there, or set TMPDIR to another folder"
        ) from error
    return tokens, np.array(lengths, np.int64)
