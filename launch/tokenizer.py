"""From text to token ids."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coat_launch.errors import LaunchError

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
