"""What is asked for that changes memory, and that no plan counts."""

import argparse
from collections.abc import Mapping, Sequence

from coat_ds.plan.layout import section
from coat_ds.zero.block import enabled

_OF_DEEPSPEED = {
    "tensor_parallel.autotp_size": "layers are split and take less",
    "zero_optimization.mics_shard_size": "weights and states are divided by that alone and take more",
    "zero_optimization.zero_quantized_gradients": "buffers of its messages come on top",
    "activation_checkpointing.partition_activations": "inputs of recomputed layers take less",
    "activation_checkpointing.cpu_checkpointing": "inputs of recomputed layers are on the CPU",
    "sequence_parallel_size": "sequences are split; give --sequence the tokens that a GPU has",
    "torch_autocast.enabled": "weights in FP32 take 2 bytes a parameter more",
    "compile.deepcompile": "it gathers and keeps what it decides",
}
_OF_MEGATRON = {
    "context-parallel-size": "sequences are split; give --sequence the tokens that a GPU has",
    "mtp-num-layers": "layers that predict further tokens come on top",
    "num-layers-per-virtual-pipeline-stage": "interleaved stages keep more",
    "num-virtual-stages-per-pipeline-rank": "interleaved stages keep more",
    "cpu-offloading-num-layers": "what these layers keep is on the CPU",
    "recompute-granularity": "rows that are named recompute do so with whole layers, others do not",
    "fp8-format": "no row has Transformer Engine's FP8",
}
_FLAGS_OF_MEGATRON = {
    "optimizer-cpu-offload": "states are planned on the GPU",
    "use-precision-aware-optimizer": "rows of BF16 have masters and moments in FP32",
    "use-megatron-fsdp": "weights are planned whole",
    "use-torch-fsdp2": "weights are planned whole",
}


def of_deepspeed(config: Mapping) -> list[str]:
    """Keys of a DeepSpeed JSON, each with why. Raises PlanError for sections that are no objects."""
    found = []
    for path, what in _OF_DEEPSPEED.items():
        outer, _, inner = path.rpartition(".")
        value = (section(config, outer) if outer else config).get(inner)
        # sizes count from 2 on
        if isinstance(value, int) and value > (0 if isinstance(value, bool) else 1):
            found.append(f"{path}: {what}")
    types = ("bf16", "bfloat16", "fp16", "torch_autocast")
    # Trainer fills in "auto"
    if not any(enabled(config, name, auto=True) for name in types):
        found.append("bf16.enabled is not set: weights and gradients in FP32 take 4 bytes a parameter more")
    return found


def of_megatron(arguments: Sequence[str]) -> list[str]:
    """Megatron-LM's arguments, each with why."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _OF_MEGATRON:
        parser.add_argument(f"--{name}", nargs="?", const="")
    for name in _FLAGS_OF_MEGATRON:
        parser.add_argument(f"--{name}", action="store_true")
    said = vars(parser.parse_known_args(list(arguments))[0])
    # values that ask for nothing
    nothing = {"context-parallel-size": "1", "mtp-num-layers": "0", "cpu-offloading-num-layers": "0"}
    return [
        f"--{name}: {what}"
        for name, what in (_OF_MEGATRON | _FLAGS_OF_MEGATRON).items()
        if said[name.replace("-", "_")] not in (None, False, nothing.get(name))
    ]
