"""The options of an AdamW step, spelled once."""

import math
from dataclasses import dataclass

import torch

from coat_kernels.codecs.codec import Codec


@dataclass(frozen=True, slots=True)
class AdamWOptions:
    """How one step updates all tensors that it is called for."""

    exp_avg_codec: Codec
    exp_avg_sq_codec: Codec
    group_size: int
    """Elements that share a scale in the storage of both moments."""
    lr: float | torch.Tensor
    """A number, or on CUDA an FP32 tensor of one element on the device."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False
    stochastic: bool = False
    """Round BF16 parameters without remainders stochastically."""
    dither: bool = False
    """Round exp_avg_sq up or down in turn (`dither_reference`)."""
    seed: int = 0
    """Seed of stochastic rounding."""

    def bias_corrections(self, step: float) -> tuple[float, float]:
        """What exp_avg is divided by after `step` steps, and what the root of exp_avg_sq is divided by."""
        return 1 - self.beta1**step, math.sqrt(1 - self.beta2**step)
