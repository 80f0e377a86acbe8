"""What is relied on in the hosts beyond their documented interfaces, each by name, against the real packages.

A framework that changes one of them fails here, with its name, and not in a user's run. `test-hosts` runs
these with the other supported DeepSpeed.
"""

import inspect
import pkgutil
import warnings

import pytest
import torch

from tests.coat_ds.engines import STATES, engine_of
from tests.util import run_distributed

# names that are used, and the arguments that are passed by name or position
NAMES: dict[str, str] = {
    "deepspeed.runtime.config:DeepSpeedConfig.__init__": "config",
    "deepspeed.runtime.tensor_parallel.init_utils:load_ds_config": "config",
    "deepspeed.runtime.zero.utils:ZERO_SUPPORTED_OPTIMIZERS": "",
    "deepspeed.utils:log_dist": "message ranks level",
    # what is called on an engine, or was replaced in it
    "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer": "",
    "deepspeed.ops.adam:FusedAdam": "",
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine": "",
    "deepspeed.runtime.base_optimizer:ZeROOptimizer": "",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state": "",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._link_all_hp_params": "",
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer._link_all_hp_params": "",
    "deepspeed.runtime.constants:PIPE_REPLICATED": "",
    "deepspeed.runtime.utils:is_model_parallel_parameter": "p",
    "deepspeed.runtime.zero.offload_config:OffloadStateTypeEnum.optim_states": "",
    # activation checkpointing
    "deepspeed.runtime.activation_checkpointing.checkpointing:CONTIGUOUS_CHECKPOINTING": "",
    "deepspeed.runtime.activation_checkpointing.checkpointing:PARTITION_ACTIVATIONS": "",
    "deepspeed.runtime.activation_checkpointing.checkpointing:CPU_CHECKPOINT": "",
    "deepspeed.runtime.activation_checkpointing.checkpointing:mp_size": "",
    "deepspeed.runtime.activation_checkpointing.checkpointing:mp_rank": "",
    "deepspeed.runtime.activation_checkpointing.checkpointing:mp_group": "",
    "deepspeed.comm:all_gather_into_tensor": "",
    # torch
    "torch.utils.checkpoint:CheckpointFunction.apply": "",
    "torch:_foreach_norm": "",
    "torch:_import_device_backends": "",
    "torch.optim:Optimizer.register_load_state_dict_pre_hook": "hook",
}


@pytest.mark.parametrize("name", NAMES)
def test_frameworks_have_the_name(name):
    found = pkgutil.resolve_name(name)
    if NAMES[name]:
        missing = set(NAMES[name].split()) - inspect.signature(found).parameters.keys()
        assert not missing, f"{name} no longer takes {', '.join(missing)}"


SHARES = [
    *("single_partition_of_fp32_groups", "bit16_groups", "_hp_optimizer_states_linked", "offloaded_states"),
    *("params_in_partition", "partition_size", "real_dp_process_group", "get_param_id"),
    *("grad_partition_insertion_offset", "grad_start_offset"),
]
# attributes of what DeepSpeed puts around an optimizer, and of the parameters, by stage
ATTRIBUTES = {
    0: ["fp32_groups_flat", "fp16_groups"],
    1: SHARES,
    2: SHARES,
    3: ["fp32_partitioned_groups_flat", "fp16_groups", "sub_group_to_group_id", "offloaded_states"],
    "bf16": ["fp32_groups_flat_partition", "bf16_groups"],
}
PARAMETERS = {"bf16": ["_hp_mapping"], 3: ["ds_numel", "ds_shape", "ds_process_group"]}


def build():
    """What is missing of all that, and what DeepSpeed does with a block that it does not know."""
    warnings.simplefilter("ignore")
    missing, seen = [], {}
    for stage, names in ATTRIBUTES.items():
        sums = {"data_types": {"grad_accum_dtype": "fp32"}} if stage == "bf16" else {}
        engine = engine_of(torch.nn.Linear(64, 64), 1 if stage == "bf16" else stage, STATES, **sums)
        missing += [(stage, name) for name in names if not hasattr(engine.optimizer, name)]
        p = next(engine.module.parameters())
        missing += [(stage, name) for name in PARAMETERS.get(stage, []) if not hasattr(p, name)]
        names = ("basic_optimizer", "checkpoint_engine", "module", "optimizer", "_config")
        missing += [(stage, f"engine.{name}") for name in names if not hasattr(engine, name)]
        seen[stage] = engine._config._param_dict.get("coat"), type(engine.optimizer).__name__
    return missing, seen


def test_deepspeed_engines_have_the_attributes():
    missing, seen = run_distributed(build, 1)[0]
    assert not missing, f"gone from DeepSpeed: {missing}"
    assert {block["enabled"] for block, _ in seen.values()} == {True}
    assert [name for _, name in seen.values()] == [
        "FP16_Optimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
        "BF16_Optimizer",
    ]
