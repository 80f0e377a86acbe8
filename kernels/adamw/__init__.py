"""AdamW over stored moments, in one pass.

It may import `codecs` and the files of `coat_kernels`. Start at step.py, which optimizers call. reference.py
specifies the step, and computes it on a CPU. On a GPU, kernel.py updates tensors in the chunks that chunks.py
computes. storing.py measures the error that storing adds to a step.
"""

from coat_kernels.adamw.options import AdamWOptions
from coat_kernels.adamw.reference import dither_reference, join_master, split_master
from coat_kernels.adamw.step import adamw_

__all__ = ["AdamWOptions", "adamw_", "dither_reference", "join_master", "split_master"]
