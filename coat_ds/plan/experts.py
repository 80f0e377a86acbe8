"""MoE feed-forward layers of transformers and of Megatron, where each token uses a few experts.

Tokens are taken to be spread evenly over experts. A token has a row at each of its experts. Bytes that a row
saves, with h hidden channels, f after the expert's activation, and g = 17/16, a byte and a group's share of
its scale:

| | BF16 | COAT |
|---|---|---|
| transformers | 2 (2 h + 4 f) | 2 g f |
| Megatron, all-to-all dispatcher | 2 (h + 3 f) | h + 2 g f, by `--moe-grouped-gemm` |
"""

from dataclasses import dataclass

BF16, FP32, INT64 = 2, 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What replaces the feed-forward of a layer. `h` is the number of hidden channels."""

    layers: int
    """Layers that have experts."""
    count: int
    """Experts in such a layer."""
    used: int
    """Experts that a token takes."""
    ffn: int
    """Channels between the two GEMMs of an expert."""
    shared: int = 0
    """Channels of the shared expert, which every token uses."""
    shared_gate: bool = False
    """A GEMM with one column weighs the shared expert's output."""
    gated: bool = True
    """An expert has two GEMMs before its activation and one after it; else one and one."""

    def weights(self, h: int) -> int:
        """Elements of all experts' matrices, which are one module."""
        return h * (2 + self.gated) * self.count * self.ffn

    def matrices(self, h: int) -> int:
        """Elements of the matrices of a feed-forward layer, with the router's."""
        return h * (self.count + self.shared_gate) + self.converted(h)

    def converted(self, h: int) -> int:
        """Elements of `matrices` that COAT multiplies in FP8."""
        return self._channels(self.count, h)

    def active(self, h: int) -> int:
        """Elements that a token is multiplied with."""
        return h * (self.count + self.shared_gate) + self._channels(self.used, h)

    def converted_active(self, h: int) -> int:
        """Elements that a token is multiplied with in FP8."""
        return self._channels(self.used, h)

    def _channels(self, experts: int, h: int) -> int:
        """Elements of `experts` experts and the shared one."""
        return h * (2 + self.gated) * (experts * self.ffn + self.shared)

    def saved(self, h: int, code: float | None, megatron: bool) -> float:
        """Bytes that a layer's experts and router save for a token. code: bytes of COAT's codes; None: BF16.

        A router's losses are not counted.
        """
        if megatron:
            return self._saved_by_megatron(h, code)
        # all probabilities; of each expert taken its number, and its weight and the order of rows in 32 bits,
        # which stock layers keep in several ways
        routing = FP32 * self.count + (4 * INT64 if code is None else INT64 + 3 * FP32) * self.used
        if code is None:
            # input, output, gate and up, the activation's output and the product
            return routing + BF16 * self.used * (2 * h + 4 * self.ffn) + BF16 * 4 * self.shared
        # the router reads the norm's output, which other layers recompute
        routing += BF16 * h + code * 2 * self.shared
        return routing + self.used * code * 2 * self.ffn

    def _saved_by_megatron(self, h: int, code: float | None) -> float:
        # of each expert the token's place in the order of tokens, or in megatron-core 0.16 a probability and
        # whether the token takes it, 3 bytes; of each expert taken its number, the token's row there, and the
        # probability in FP32 and in BF16
        routing = INT64 * self.count + (2 * INT64 + FP32 + BF16) * self.used
        if code is None:
            ffn = BF16 * (2 + self.gated)
            return routing + self.used * (BF16 * h + ffn * self.ffn) + ffn * self.shared
        # the router reads the norm's output; experts keep their rows in FP8
        ffn = code * (1 + self.gated)
        return routing + BF16 * h + self.used * (h + ffn * self.ffn) + ffn * self.shared
