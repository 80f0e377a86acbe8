"""Text files to token ids in a memory map: tokenised once, block by block, into an unnamed temporary file.

Every process tokenises for itself, so use the indexed format for a corpus of many gigabytes.
"""

import json
import re
import sysconfig
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from coat_launch.errors import DataError
from coat_launch.tokenizer import Tokenizer

BLOCK_BYTES = 1 << 20
_STDLIB_BYTES = 4 << 20
# encodings: tables, and a batch that consists of tables would make the loss jump
_STDLIB_SKIPPED = {"encodings", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# JSON escapes that are half of a character (surrogates)
_HALVES = re.compile("[\ud800-\udfff]")


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
        raise DataError(f"{root} holds no Python sources to train on: give text with --data")
    return chosen


def read_documents(paths: Iterable[Path]) -> Iterator[Iterator[str]]:
    """One iterator of text blocks for each document."""
    for path in paths:
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path)
        else:
            yield _read_text(path)


def _read_text(path: Path) -> Iterator[str]:
    """Blocks that end at a line's end, so that no character and hardly any token is split."""
    offset = 0
    with open_file(path) as file:
        while block := file.read(BLOCK_BYTES):
            block += file.readline()
            yield _decode(block, path, offset)
            offset += len(block)


def _read_jsonl(path: Path) -> Iterator[Iterator[str]]:
    offset = 0
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            text = _decode(line, path, offset)
            offset += len(line)
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            # RecursionError: deeply nested objects; ValueError: also integers of thousands of digits
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


def open_file(path: Path):
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
        raise DataError(
            f"cannot keep the tokenised text in {tempfile.gettempdir()} ({error.strerror}): "
            "make room there, or set TMPDIR to another folder"
        ) from error
    return tokens, np.array(lengths, np.int64)
