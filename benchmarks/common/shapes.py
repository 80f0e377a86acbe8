"""Sizes of what is measured."""

import dataclasses
from typing import NamedTuple

from coat_ds.plan import Sizes


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a decoder layer and of what it is run on."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    """Key and value heads."""
    batch: int
    sequence: int
    llama: bool = True
    """RMSNorm, SwiGLU, rotary positions, no biases. Else LayerNorm, GELU (tanh) and biases, no positions."""

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Columns of queries, keys and values together."""
        return (self.heads + 2 * self.groups) * self.head_dim

    @property
    def fc1(self) -> int:
        """Columns before the activation function."""
        return 2 * self.ffn if self.llama else self.ffn

    def sizes(self, layers: int = 1, vocabulary: int = 1) -> Sizes:
        """The sizes of a model of such layers."""
        return Sizes(
            layers=layers,
            hidden=self.hidden,
            ffn=self.ffn,
            heads=self.heads,
            groups=self.groups,
            head_dim=self.head_dim,
            vocabulary=vocabulary,
            gated=self.llama,
        )


LAYERS = {
    "llama-2-7b": LayerShape(4096, 11008, 32, 32, batch=4, sequence=2048),
    "llama-3-8b": LayerShape(4096, 14336, 32, 8, batch=1, sequence=8192),
    "gpt": LayerShape(4096, 16384, 32, 32, batch=4, sequence=2048, llama=False),
    # from the paper's table of layers, as llama-2-7b is; it does not name the feed-forward's width
    "paper-h2048-s2048": LayerShape(2048, 5504, 16, 16, batch=4, sequence=2048),
    "paper-h2048-s4096": LayerShape(2048, 5504, 16, 16, batch=4, sequence=4096),
    "paper-h4096-s4096": LayerShape(4096, 11008, 32, 32, batch=4, sequence=4096),
    "tiny": LayerShape(128, 352, 4, 2, batch=2, sequence=48),
    "tiny-gpt": LayerShape(128, 512, 4, 4, batch=2, sequence=48, llama=False),
}
TINY = ("tiny", "tiny-gpt")
# measured where no shape is named
BY_DEFAULT = ("llama-2-7b", "llama-3-8b", "gpt")


class Stack(NamedTuple):
    """Equal decoder layers."""

    layer: LayerShape
    layers: int


STACK = Stack(LayerShape(2048, 5632, 16, 16, batch=4, sequence=2048), 24)
SMALL_STACK = Stack(LayerShape(128, 192, 2, 2, batch=2, sequence=64), 3)
