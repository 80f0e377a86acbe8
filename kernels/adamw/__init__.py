"""AdamW over stored moments, in one pass.

reference.py specifies the step, and computes it on a CPU. On a GPU, kernel.py updates tensors in the chunks
that chunks.py computes. step.py is what optimizers call. storing.py measures the error that storing
adds to a step.
"""

from coat_kernels.adamw.kernel import join_tile, split_tile
from coat_kernels.adamw.options import AdamWOptions
from coat_kernels.adamw.reference import (
    adamw_reference,
    dither_reference,
    join_master,
    noise_reference,
    round_stochastically,
    split_master,
)
from coat_kernels.adamw.step import PIECE, adamw_, adamw_triton

__all__ = [
    "AdamWOptions",
    "PIECE",
    "adamw_",
    "adamw_reference",
    "adamw_triton",
    "dither_reference",
    "join_master",
    "join_tile",
    "noise_reference",
    "round_stochastically",
    "split_master",
    "split_tile",
]
