"""Imports for ranks without a GPU, made once: the server that forks the ranks loads this file."""

import contextlib
import gc
import importlib
import os
import sys

# imported objects are permanent: garbage collections during the imports would take a tenth of the time
gc.disable()

from tests.hosts import share_groups_of_the_same_ranks, write_checkpoints_in_threads  # noqa: E402
from tests.interpreter import quicken_interpreter  # noqa: E402
from tests.util import RARELY  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken_interpreter()

# Megatron uses Transformer Engine's norms if it is installed, and they need a GPU
sys.modules["transformer_engine"] = None

# environments with other versions do not have all of these
for name in (
    "deepspeed",
    "coat_ds.zero.engine",
    "megatron.core.models.gpt",
    "megatron_ext.model",
    "megatron_ext.layer_specs",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "matplotlib.pyplot",
    "pytest",
):
    # Megatron's adapter raises a RuntimeError if Megatron is not installed
    with contextlib.suppress(ImportError, RuntimeError):
        importlib.import_module(name)

with contextlib.suppress(ImportError):
    import deepspeed

    # every machine would compile DeepSpeed's shared-memory collectives first; gloo does the same
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed requires a CPU with FP16 instructions; torch computes FP16 on any CPU
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True

with contextlib.suppress(ImportError):
    write_checkpoints_in_threads()
    share_groups_of_the_same_ranks()

# DeepSpeed runs the garbage collector for every engine: it can skip the imported objects
gc.collect()
gc.freeze()
gc.set_threshold(*RARELY)
gc.enable()
