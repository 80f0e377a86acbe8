"""What ranks without a GPU import, once: the server that forks them loads this file."""

import contextlib
import gc
import importlib
import os
import sys

# what is imported stays: collections of garbage on the way would take a tenth of the time
gc.disable()

from tests.hosts import fork_managers_of_checkpoints  # noqa: E402
from tests.interpreter import quicken_interpreter  # noqa: E402
from tests.util import RARELY  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken_interpreter()

# Megatron takes Transformer Engine's norms wherever it is, and they need a GPU
sys.modules["transformer_engine"] = None

# in the environments of other versions not all of them are there
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
    # Megatron's adapter says with a RuntimeError that Megatron is not there
    with contextlib.suppress(ImportError, RuntimeError):
        importlib.import_module(name)

with contextlib.suppress(ImportError):
    import deepspeed

    # every machine would compile DeepSpeed's shared-memory collectives first; gloo does the same
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed asks for a CPU with FP16 instructions; torch computes it on any
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True

with contextlib.suppress(ImportError):
    fork_managers_of_checkpoints()

# DeepSpeed collects garbage with every engine: it need not look at what has been imported
gc.collect()
gc.freeze()
gc.set_threshold(*RARELY)
gc.enable()
