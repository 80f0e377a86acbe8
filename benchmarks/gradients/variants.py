"""How gradients are rounded, emulated: `Emulated` is what `round_operands` rounds by."""

from typing import NamedTuple

import torch

from benchmarks.common.environment import device
from benchmarks.common.rounding import FORWARD
from coat_kernels.fp8 import E4M3, E5M2, Fp8Format
from coat_kernels.tensorwise.quantize import to_tensor_codes_reference
from coat_kernels.tensorwise.scale import tensor_scale_reference

# parts of the names of layers, by kind
KINDS = {"qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",), "gate_up": ("gate_proj", "up_proj")}
KINDS |= {"down": ("down_proj",)}
# the mean length that rounding to nearest in E5M2 leaves of a normal gradient
E5M2_LENGTH = 0.9972


class Variant(NamedTuple):
    """How the gradients of outputs are rounded, and which layers are in BF16."""

    fmt: Fp8Format = E5M2
    dgrad_rows: bool = False
    """One scale for each token in dgrad."""
    wgrad_columns: bool = False
    """One scale for each output channel in wgrad."""
    stochastic: bool = False
    factor: float = 1.0
    """On all gradients, after rounding."""
    bf16: tuple[str, ...] = ()
    """Parts of names of layers whose three GEMMs are in BF16; "ends" is the first and the last layer."""
    bf16_wgrad: tuple[str, ...] = ()
    """The same of layers whose wgrad is in BF16."""


VARIANTS = {
    "E5M2": Variant(),
    "E4M3": Variant(E4M3),
    "E4M3, row scales in dgrad": Variant(E4M3, dgrad_rows=True),
    "E4M3, row and column scales": Variant(E4M3, dgrad_rows=True, wgrad_columns=True),
    "E5M2, stochastic": Variant(stochastic=True),
    "E4M3, stochastic": Variant(E4M3, stochastic=True),
    "E5M2, length restored": Variant(factor=1 / E5M2_LENGTH),
    "E5M2, wgrad of qkv in BF16": Variant(bf16_wgrad=KINDS["qkv"]),
    "E5M2, wgrad in BF16": Variant(bf16_wgrad=("",)),
    "E5M2, wgrad of first and last layer in BF16": Variant(bf16_wgrad=("ends",)),
    "E5M2, first and last layer in BF16": Variant(bf16=("ends",)),
    "E4M3, first and last layer in BF16": Variant(E4M3, bf16=("ends",)),
    "E5M2, down_proj in BF16": Variant(bf16=("down_proj",)),
    "BF16": Variant(bf16=("",)),
}


def rounded(
    x: torch.Tensor, fmt: Fp8Format, dim: int | None = None, stochastic: bool = False
) -> torch.Tensor:
    """`x` [m, n] in FP8 and back: one scale for all, or with `dim` for each slice along it."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = tensor_scale_reference(amax, fmt)
    if not stochastic:
        return to_tensor_codes_reference(x, scale, fmt).to(x.dtype) * scale
    value = x / scale
    mantissa, smallest = (2, -14) if fmt is E5M2 else (3, -6)
    exponent = (torch.frexp(value).exponent - 1).clamp(min=smallest)
    step = torch.ldexp(torch.ones_like(value), exponent - mantissa)
    code = ((value / step + torch.rand_like(value)).floor() * step).clamp(-fmt.max, fmt.max)
    return code * scale


class Emulated:
    """A `Rounding` of a variant; without `backward`, of the operands of its forward GEMMs alone."""

    def __init__(self, variant: Variant, layers: int, backward: bool = True):
        self.variant, self.backward = variant, backward
        self.ends = ("layers.0.", f"layers.{layers - 1}.")
        self.flushed, self.nonzero = torch.zeros(2, device=device()).unbind()

    def _among(self, layer: str, parts: tuple[str, ...]) -> bool:
        return any(part in layer for part in (self.ends if parts == ("ends",) else parts))

    def __call__(self, layer: str, operand: str, x: torch.Tensor) -> torch.Tensor:
        one = self.variant
        if not self.backward and operand not in FORWARD:
            return x
        if self._among(layer, one.bf16) or operand.startswith("wgrad") and self._among(layer, one.bf16_wgrad):
            return x.bfloat16().to(x.dtype)
        if not operand.endswith("grad"):
            return rounded(x, E4M3)
        dim = {"dgrad grad": 1 if one.dgrad_rows else None, "wgrad grad": 0 if one.wgrad_columns else None}
        found = rounded(x, one.fmt, dim[operand], one.stochastic)
        self.nonzero += (x != 0).sum()
        self.flushed += ((x != 0) & (found == 0)).sum()
        return found * one.factor
