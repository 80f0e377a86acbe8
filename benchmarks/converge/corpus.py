"""Text that is on the machine, sources and documentation of Python packages, as token ids to train on.

Every file of the named kinds is a document; equal files count once. A file is held out or trained on by the
hash of its content alone, so that the split is the same for every seed and on every machine. Nothing keeps
files that are nearly equal, such as a package and a copy inside another, on one side.
"""

import csv
import hashlib
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coat_launch.batches import Split
from coat_launch.data import Tokenizer

SUFFIXES = {".py", ".pyi", ".pyx", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".c", ".cc"}
# larger ones are tables and generated code
LARGEST = 1 << 20
# one file of this number is held out
HELD_OUT = 32
END_OF_DOCUMENT = "<|endoftext|>"
# what the tokenizer is trained on, and what is tokenized at a time
SAMPLE_BYTES, BLOCK_BYTES = 32 << 20, 16 << 20


class Document(NamedTuple):
    path: str
    digest: str
    """SHA-256 of the content, in hexadecimal."""
    text: str

    @property
    def held_out(self) -> bool:
        return int(self.digest[:8], 16) % HELD_OUT == 0


class TokenizedText(NamedTuple):
    train: Split
    held_out: Split
    vocab_size: int
    identity: dict[str, object]
    """Hash of the manifest and of the tokenizer, and the sizes: equal for equal data."""


def installed_roots() -> list[Path]:
    """The standard library and the packages next to it; not what PYTHONPATH adds."""
    return sorted({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})


def read_documents(roots: Iterable[Path], limit: int) -> Iterator[Document]:
    """Documents below the roots, sorted by path, until their bytes reach `limit`.

    Left out: empty files, those above 1 MiB, those that are not UTF-8, and all but the first of equal ones.
    """
    seen, total = set(), 0
    for root in roots:
        for path in sorted(_files(root)):
            try:
                content = path.read_bytes()
                text = content.decode()
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256(content).hexdigest()
            if not content or len(content) > LARGEST or digest in seen:
                continue
            seen.add(digest)
            total += len(content)
            if total > limit:
                return
            yield Document(str(path.relative_to(root)), digest, text)


def _files(root: Path) -> Iterator[Path]:
    # a virtual environment's packages lie below its standard library's neighbour, never twice below a root
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in ("__pycache__", "site-packages", "dist-packages")]
        yield from (Path(folder, name) for name in names if Path(name).suffix in SUFFIXES)


def train_tokenizer(texts: Sequence[str], vocab_size: int, path: Path) -> None:
    """Writes a byte-level byte-pair tokenizer.json, trained on texts spread over all of them."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stride = max(1, sum(map(len, texts)) // SAMPLE_BYTES)
    tokenizer.train_from_iterator(texts[::stride], trainer)
    tokenizer.save(str(path))


def _encode(texts: Sequence[str], path: Path) -> list[np.ndarray]:
    """Token ids of each text and the end-of-document token, uint16."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    ids, block, size = [], [], 0
    for i, text in enumerate(texts):
        block.append(text)
        size += len(text)
        if size > BLOCK_BYTES or i == len(texts) - 1:
            # all cores at once
            encoded = tokenizer.encode_batch_fast(block, add_special_tokens=False)
            ids += [np.asarray([*one.ids, end], np.uint16) for one in encoded]
            block, size = [], 0
    return ids


def name_of(roots: Sequence[Path], vocab_size: int, limit: int, tokenizer: str | None = None) -> str:
    """A name for the folder of what `prepare` makes of these arguments."""
    given = [list(map(str, roots)), vocab_size, limit]
    if tokenizer is not None:
        given.append(hashlib.sha256(tokenizer.encode()).hexdigest())
    return hashlib.sha256(repr(tuple(given)).encode()).hexdigest()[:8]


def prepare(
    folder: Path, roots: Sequence[Path], vocab_size: int, limit: int, tokenizer: str | None = None
) -> None:
    """Makes `folder` with manifest, tokenizer and token ids, all or nothing; does nothing if it is there.

    tokenizer: the content of a tokenizer.json; without one, one of `vocab_size` ids is trained.
    Raises ValueError if the roots hold too little text to train on and hold out.
    """
    if folder.exists():
        return
    documents = list(read_documents(roots, limit))
    parts = {
        "train": [d for d in documents if not d.held_out],
        "held_out": [d for d in documents if d.held_out],
    }
    if not all(parts.values()):
        raise ValueError(
            f"{', '.join(map(str, roots))}: {len(documents)} files of text, {len(parts['held_out'])} of them "
            "held out: give more with --text"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent))
    with (part / "manifest.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "bytes", "sha256", "part"))
        for name, chosen in parts.items():
            writer.writerows((d.path, len(d.text.encode()), d.digest, name) for d in chosen)
    if tokenizer is None:
        train_tokenizer([d.text for d in parts["train"]], vocab_size, part / "tokenizer.json")
    else:
        (part / "tokenizer.json").write_text(tokenizer)
    for name, chosen in parts.items():
        ids = _encode([d.text for d in chosen], part / "tokenizer.json")
        np.save(part / f"{name}.npy", np.concatenate(ids))
        np.save(part / f"{name}_lengths.npy", np.array([len(one) for one in ids], np.int64))
    try:
        part.rename(folder)
    except OSError:
        # another process was first
        shutil.rmtree(part)


def load(folder: Path, seq_length: int, seed: int) -> TokenizedText:
    """Memory-mapped splits of what `prepare` made; `seed` decides the order of the training data alone."""
    vocab_size = Tokenizer.from_file(folder / "tokenizer.json").vocab_size
    splits = []
    for name, order in (("train", seed), ("held_out", 0)):
        tokens = np.load(folder / f"{name}.npy", mmap_mode="r")
        lengths = np.load(folder / f"{name}_lengths.npy")
        documents = np.stack([np.cumsum(lengths) - lengths, lengths], 1)
        split = Split(tokens, documents, seq_length=seq_length, seed=order)
        if not len(split):
            raise ValueError(
                f"{folder}: the part {name} has {split.num_tokens} tokens, less than one sequence of "
                f"{seq_length}: give more with --text"
            )
        splits.append(split)
    identity = {
        "manifest": _digest(folder / "manifest.csv"),
        "tokenizer": _digest(folder / "tokenizer.json"),
        "train_tokens": splits[0].num_tokens,
        "held_out_tokens": splits[1].num_tokens,
    }
    return TokenizedText(*splits, vocab_size, identity)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
