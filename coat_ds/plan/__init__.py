"""What training takes before anything is allocated: bytes by role, time at best, and what fits a GPU.

It may import `coat_kernels`, the config and the readers of DeepSpeed's JSON. Start at command.py, or at
memory.py for the prediction.

    read.py, from_transformers.py       the sizes of a model (sizes.py, experts.py)
    deepspeed_layout.py                 how training is spread over GPUs (layout.py), from a DeepSpeed JSON
    systems.py                          what computes layers and steps weights: BF16, configurations of COAT
    memory.py                           the peak: model_states.py, passes.py, saved.py
    roofline.py, gpus.py                the least time of a step
    advice.py, deepspeed_json.py        the fastest that fits, and its JSON
    command.py, report.py               `coat plan`

from coat_ds import plan

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
sizes = plan.from_module(model)
layout = plan.from_deepspeed(ds_config, sizes, gpus=8, sequence=4096)
plan.predict(sizes, layout, plan.all_systems()["COAT"]).peak.total  # bytes
"""

from coat_ds.plan.deepspeed_layout import from_deepspeed
from coat_ds.plan.errors import PlanError
from coat_ds.plan.from_transformers import from_module
from coat_ds.plan.gpus import GPUS, Gpu, find_gpu
from coat_ds.plan.layout import Layout
from coat_ds.plan.memory import ROLES, Memory, Prediction, predict
from coat_ds.plan.roofline import Time, flops, layer_flops, step_time
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System, all_systems

__all__ = [
    "GPUS",
    "Gpu",
    "Layout",
    "Memory",
    "PlanError",
    "Prediction",
    "ROLES",
    "Sizes",
    "System",
    "Time",
    "flops",
    "from_deepspeed",
    "from_module",
    "find_gpu",
    "layer_flops",
    "predict",
    "all_systems",
    "step_time",
]
