"""Settings that change memory and that no plan counts."""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
# arguments with which `coat_layer_spec` cannot be built, each with the value that is as good as none
OF_SPEC = {
    "fp8-format": None,
    "fp4-format": None,
    "softmax-type": "vanilla",
    "cuda-graph-impl": "none",
    "experimental-attention-variant": None,
    "heterogeneous-layers-config-path": None,
    "kitchen-config-file": None,
    "kitchen-recipe-number": None,
}
FLAGS_OF_SPEC = (
    *("fp16", "first-last-layers-bf16", "batch-invariant-mode", "reset-attention-mask", "qk-clip"),
    *("log-max-attention-logit", "delay-wgrad-compute", "defer-embedding-wgrad-compute"),
    *("use-te-activation-func", "activation-func-fp8-input-store", "moe-shared-expert-overlap"),
)


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
    nothing = {"context-parallel-size": "1", "mtp-num-layers": "0", "cpu-offloading-num-layers": "0"}
    why = _OF_MEGATRON | _FLAGS_OF_MEGATRON
    values = dict.fromkeys(_OF_MEGATRON) | nothing
    return [f"--{name}: {why[name]}" for name in _given(arguments, values, _FLAGS_OF_MEGATRON)]


def refused_by_spec(arguments: Sequence[str]) -> list[str]:
    """The arguments of Megatron-LM with which `coat_layer_spec` cannot be built."""
    return [f"--{name}" for name in _given(arguments, OF_SPEC, FLAGS_OF_SPEC)]


def _given(arguments: Sequence[str], values: Mapping[str, str | None], flags: Iterable[str]) -> Iterator[str]:
    """The names in `values` and `flags` that Megatron-LM's `arguments` set.

    values: for the name of an argument with a value, the value that is as good as none.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in values:
        parser.add_argument(f"--{name}", nargs="?", const="")
    for name in flags:
        parser.add_argument(f"--{name}", action="store_true")
    found = vars(parser.parse_known_args(list(arguments))[0])
    for name in (*values, *flags):
        if found[name.replace("-", "_")] not in (None, False, values.get(name)):
            yield name
