"""Sizes of the pictures and of the model that reads them."""

from typing import NamedTuple


class Stack(NamedTuple):
    """Of transformer layers."""

    hidden: int
    ffn: int
    layers: int
    heads: int


class Sizes(NamedTuple):
    image: int
    """Height and width."""
    patch: int
    digits: int
    """In a picture."""
    fonts: tuple[int, ...]
    """Their heights in pixels, about."""
    train: int
    """Pictures."""
    held_out: int
    tower: Stack
    decoder: Stack

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2

    @property
    def sequence(self) -> int:
        """Tokens: the patches, the question, and all digits but the last."""
        return self.patches + self.digits


FULL = Sizes(64, 8, 5, tuple(range(14, 21)), 65536, 2048, Stack(384, 1536, 6, 6), Stack(512, 1536, 6, 8))
QUICK = Sizes(16, 8, 2, (10,), 64, 16, Stack(64, 128, 2, 2), Stack(64, 128, 2, 2))
