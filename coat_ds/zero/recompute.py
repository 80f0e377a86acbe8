"""FP8 inputs of regions that DeepSpeed recomputes. For torch's see `coat_kernels.autograd.checkpointing`.

`deepspeed.checkpointing.checkpoint` keeps the inputs of a region in an attribute of its autograd context,
which autograd's hooks do not see. It looks up its autograd function, `CheckpointFunction`, in its module. A
patch puts a subclass there. The subclass does what DeepSpeed's class does, unless a module with the block
runs forward in the same thread. Then it keeps codes in the inputs' place.

`non_reentrant_checkpoint` keeps inputs in a closure that no other code can reach. It is unchanged.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

from coat_ds.checkpointing import compressed_checkpoints
from coat_ds.config import CoatConfigError
from coat_ds.log import log_rank_0, warn_rank_0
from coat_ds.patches import Patch
from coat_ds.zero.block import section
from coat_kernels.autograd.checkpointing import (
    MIN_NUMEL,
    CompressedTensor,
    alive_compressed,
    compress,
    compressed_bytes,
    is_activation,
    is_compressing,
    region,
)

CHECKPOINT = Patch(
    "recompute",
    "deepspeed.runtime.activation_checkpointing.checkpointing:CheckpointFunction",
    "inputs of recomputed regions are kept in FP8 while a module with the block runs forward",
    parameters=("ctx", "run_function", "all_outputs", "args"),
    expected="a class that checkpoint() looks up, with forward",
    used_by="checkpoint",
    remedy="or drop coat.fp8_activation_checkpointing",
)
# keys of activation_checkpointing, and what `deepspeed.checkpointing.configure` sets by them
REFUSED = {
    "partition_activations": "PARTITION_ACTIVATIONS",
    "cpu_checkpointing": "CPU_CHECKPOINT",
    "contiguous_memory_optimization": "CONTIGUOUS_CHECKPOINTING",
}
REMEDY = "Drop the key, or set coat.fp8_activation_checkpointing to false."


def _refuse_placed(is_set: Callable[[str], Any]) -> None:
    """Raises CoatConfigError if a key of `REFUSED` is set, by `is_set`."""
    for key in filter(is_set, REFUSED):
        raise CoatConfigError(
            f"activation_checkpointing.{key}: found True; FP8 inputs are kept whole, on their GPU. {REMEDY}"
        )


def check_config(config: Mapping[str, Any]) -> None:
    """Raises CoatConfigError where `coat.fp8_activation_checkpointing` would have no effect."""
    _refuse_placed(section(config, "activation_checkpointing").get)
    for name, key, value, why in (
        (
            "pipeline",
            "use_reentrant",
            False,
            "non_reentrant_checkpoint keeps inputs where they cannot be reached",
        ),
        ("compile", "deepcompile", True, "compiled regions keep their inputs as they are"),
    ):
        if section(config, name).get(key) is value:
            raise CoatConfigError(f"{name}.{key}: found {value}; {why}. {REMEDY}")


@contextlib.contextmanager
def compressed() -> Iterator[None]:
    """A context for a forward pass, in which DeepSpeed's and torch's checkpointing keep inputs in FP8.

    Raises CoatConfigError, from `checkpoint`, if DeepSpeed was configured to partition or move inputs.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed

    CHECKPOINT.apply(functools.partial(_compressing_function, deepspeed))
    with compressed_checkpoints():
        yield


def compress_inputs(module: torch.nn.Module) -> None:
    """Runs every forward pass of `module` in `compressed`."""
    forward = module.forward
    # not hooks, because torch runs none after a KeyboardInterrupt; and no closure, because a copy of the
    # module must call its own forward
    module.forward = functools.update_wrapper(functools.partial(_in_compressed, forward), forward)


def stop_compressing_inputs(module: torch.nn.Module) -> None:
    """Undoes `compress_inputs`, if it was done."""
    forward = vars(module).get("forward")
    if isinstance(forward, functools.partial) and forward.func is _in_compressed:
        del module.forward
        if module.forward != forward.args[0]:
            # for example the forward of a converted layer
            module.forward = forward.args[0]


def report_compressed(module: torch.nn.Module) -> None:
    """Logs, after the first training forward of `module`, how many checkpointed inputs are kept in FP8, and
    their bytes; a warning if there are none."""

    @torch.compiler.disable
    def report(*_) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        handle.remove()
        if made := alive_compressed():
            codes, instead_of = compressed_bytes()
            log_rank_0(
                f"{len(made)} checkpointed inputs are kept in FP8, in {codes:,} bytes in place of "
                f"{instead_of:,}"
            )
            return
        warn_rank_0(
            "coat.fp8_activation_checkpointing: found True, but the first forward has checkpointed no "
            f"activation of {MIN_NUMEL:,} elements or more, so that nothing is compressed. Turn on the "
            "model's activation checkpointing (Hugging Face: gradient_checkpointing; Megatron: "
            "recompute_granularity), or drop the key."
        )

    handle = module.register_forward_hook(report)


def _in_compressed(forward: Callable, *args, **kwargs):
    with compressed():
        return forward(*args, **kwargs)


def _compressing_function(deepspeed: ModuleType, base: type) -> type:
    class CheckpointFunction(base):
        __doc__ = base.__doc__

        @staticmethod
        def forward(ctx, run_function, all_outputs, *args):
            if not is_compressing():
                return base.forward(ctx, run_function, all_outputs, *args)
            _refuse_placed(lambda key: getattr(deepspeed, REFUSED[key]))
            outputs = base.forward(ctx, region(run_function), all_outputs, *args)
            stand_ins = {id(x): _stand_in(x) for x in args if _is_compressed(x)}
            ctx.deepspeed_saved_tensors = tuple(stand_ins.get(id(t), t) for t in ctx.deepspeed_saved_tensors)
            return outputs

    return CheckpointFunction


def _is_compressed(x: Any) -> bool:
    """Whether `x` is saved in FP8; not if its attribute `no_checkpointing` is set."""
    return is_activation(x) and not hasattr(x, "no_checkpointing")


def _stand_in(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor that DeepSpeed fills in backward with the result of `saved_data.to(device)`."""
    empty = torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True)
    empty.saved_data = _Codes(compress(x))
    return empty


class _Codes(NamedTuple):
    """An input as codes."""

    compressed: CompressedTensor

    def to(self, device: torch.device) -> torch.Tensor:
        """The decoded input, which is on `device`."""
        return self.compressed.unpack()
