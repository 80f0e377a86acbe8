"""From text to token ids."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coat_launch.errors import DataError

_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")


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
