"""The layout of a DeepSpeed JSON."""

from collections.abc import Mapping
from dataclasses import replace

from coat_ds.plan.errors import PlanError
from coat_ds.plan.layout import Layout
from coat_ds.plan.sizes import Sizes
from coat_ds.zero.block import flag, section

# as DeepSpeed reads it
_FP32_NAMES = ("fp32", "float32", "float", "torch.float32")
# numbers of zero_optimization, by the field of Layout
_NUMBERS = {
    "reduce_bucket": "reduce_bucket_size",
    "sub_group": "sub_group_size",
    "max_live": "stage3_max_live_parameters",
}
_BATCH = {"micro_batch": "train_micro_batch_size_per_gpu", "accumulation": "gradient_accumulation_steps"}
# keys that change memory in ways that are not planned; a size of 1 changes nothing
NOT_PLANNED = (
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    "zero_optimization.mics_shard_size",
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_param",
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.cpu_checkpointing",
    "torch_autocast.enabled",
    "compile.deepcompile",
)


def from_deepspeed(config: Mapping, sizes: Sizes, **rest) -> Layout:
    """The layout of a DeepSpeed JSON for a model. `rest`: fields of `Layout`, which replace the JSON's.

    Raises PlanError for values that are wrong or not planned.
    """
    _refuse(config)
    zero = dict(section(config, "zero_optimization"))
    if zero.get("reduce_bucket_size") == "auto":
        # as Trainer and Accelerate fill it in
        zero["reduce_bucket_size"] = sizes.hidden * sizes.hidden
    # DeepSpeed ignores other keys whose value is "auto"
    zero = {key: value for key, value in zero.items() if value != "auto"}
    found: dict = {"stage": _number(zero, "zero_optimization.", "stage", 0)}
    found |= {name: _number(zero, "zero_optimization.", key) for name, key in _NUMBERS.items() if key in zero}
    found |= {
        "fp32_gradients": section(config, "data_types").get("grad_accum_dtype") in _FP32_NAMES,
        "flat_gradients": zero.get("contiguous_gradients") is not False,
        "overlap": flag(zero.get("overlap_comm")),
        "offload_optimizer": _offloads(zero, "offload_optimizer"),
        "offload_parameters": _offloads(zero, "offload_param"),
    }
    batch = {name: key for name, key in _BATCH.items() if config.get(key, "auto") != "auto"}
    found |= {name: _number(config, "", key) for name, key in batch.items()}
    return _with_batch(config, found | rest, "accumulation" in rest)


def _refuse(config: Mapping) -> None:
    """Raises PlanError, naming the key, for what is not planned."""
    for path in NOT_PLANNED:
        outer, _, inner = path.rpartition(".")
        value = (section(config, outer) if outer else config).get(inner)
        if isinstance(value, int) and value > (0 if isinstance(value, bool) else 1):
            raise PlanError(
                f"{path}: found {value!r}, which is not planned. Leave it out for a plan without it."
            )


def _offloads(zero: Mapping, key: str) -> bool:
    """Whether a section of zero_optimization moves tensors away from the GPU."""
    device = section(zero, key).get("device", "none")
    if device not in ("none", "cpu", "nvme"):
        raise PlanError(f"zero_optimization.{key}.device: expected cpu or nvme, found {device!r}. Write cpu.")
    return device != "none"


def _with_batch(config: Mapping, fields: dict, accumulation_is_given: bool) -> Layout:
    """The layout with the batch sizes that DeepSpeed derives from train_batch_size."""
    layout = Layout(**fields)
    if config.get("train_batch_size", "auto") == "auto":
        return layout
    total = _number(config, "", "train_batch_size")
    if {"micro_batch", "accumulation"} <= fields.keys():
        is_product = layout.micro_batch * layout.accumulation * layout.data == total
        return replace(layout, global_batch=total) if is_product and not accumulation_is_given else layout
    if "micro_batch" not in fields:
        layout = replace(layout, micro_batch=max(1, total // (layout.data * layout.accumulation)))
    layout = layout.of_global_batch(total)
    # a number of micro-batches on the command line replaces the global batch
    return replace(layout, global_batch=None) if accumulation_is_given else layout


def _number(values: Mapping, prefix: str, key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if isinstance(value, str) and value.isdigit():
        # as pydantic reads it
        value = int(value)
    # of floats neither NaN nor infinity is whole
    is_whole = type(value) is int or (type(value) is float and value.is_integer())
    if not is_whole or value < 0:
        raise PlanError(f"{prefix}{key}: expected a whole number, found {value!r}. Write the number.")
    return int(value)
