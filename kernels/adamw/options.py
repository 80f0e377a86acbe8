"""The options of an AdamW step."""

import math
from dataclasses import dataclass

import torch

from coat_kernels.codecs.codec import Codec


@dataclass(frozen=True, slots=True)
class AdamWOptions:
    """How one step updates all tensors of a call."""

    exp_avg_codec: Codec
    exp_avg_sq_codec: Codec
    lr: float | torch.Tensor
    """A number, or on CUDA an FP32 tensor [1] on the device."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False
    stochastic: bool = False
    """Round BF16 parameters that have no remainder stochastically."""
    dither: bool = False
    """Round exp_avg_sq with a dither (`dither_reference`)."""
    seed: int = 0
    """Seed of stochastic rounding."""

    def bias_corrections(self, step: float) -> tuple[float, float]:
        """The divisors of exp_avg and of the root of exp_avg_sq after `step` steps."""
        return 1 - self.beta1**step, math.sqrt(1 - self.beta2**step)
