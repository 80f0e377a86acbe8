"""FP8 inputs of regions that DeepSpeed recomputes. For torch's see `coat_kernels.autograd.checkpointing`.

`deepspeed.checkpointing.checkpoint` keeps the inputs of a region in an attribute of its autograd context,
which autograd's hooks do not see. It looks up its autograd function, `CheckpointFunction`, in its module. A
patch puts a subclass there. The subclass does what DeepSpeed's class does, unless a module with the block
runs forward in the same thread. Then it marks the inputs `no_checkpointing`, so that DeepSpeed neither
partitions nor offloads them, and keeps codes in their place:

- with `partition_activations` the codes of this rank's share only; their all-gather has half the traffic
- with `cpu_checkpointing` the codes in CPU memory, copied on the compute stream

`non_reentrant_checkpoint` keeps inputs in a closure that no other code can reach. It is unchanged.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from coat_ds.checkpointing import compressed_checkpoints
from coat_ds.config import CoatConfigError
from coat_ds.patches import Patch
from coat_ds.zero.block import section
from coat_kernels.autograd.checkpointing import (
    Packed,
    compressing,
    is_activation,
    packed,
    region,
)

CHECKPOINT = Patch(
    "recompute",
    "deepspeed",
    "deepspeed.runtime.activation_checkpointing.checkpointing:CheckpointFunction",
    "inputs of recomputed regions are kept in FP8 while a module with the block runs forward",
    parameters=("ctx", "run_function", "all_outputs", "args"),
    method="forward",
    expected="a class that checkpoint() looks up, with forward",
    used_by="checkpoint",
    way_out="or drop coat.fp8_activation_checkpointing",
)
CONTIGUOUS = (
    "its buffers are of the activations' own type, and FP8 codes are not kept in them. Drop the key, or set "
    "coat.fp8_activation_checkpointing to false."
)


def check_config(config: Mapping[str, Any]) -> None:
    """Raises CoatConfigError where `coat.fp8_activation_checkpointing` would have no effect."""
    if section(config, "activation_checkpointing").get("contiguous_memory_optimization"):
        raise CoatConfigError(
            f"activation_checkpointing.contiguous_memory_optimization: found True; {CONTIGUOUS}"
        )
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
            raise CoatConfigError(
                f"{name}.{key}: found {value}; {why}. Drop the key, or set "
                "coat.fp8_activation_checkpointing to false."
            )


@contextlib.contextmanager
def compressed() -> Iterator[None]:
    """A context for a forward pass, in which DeepSpeed's and torch's checkpointing keep inputs in FP8.

    Raises CoatConfigError, from `checkpoint`, if DeepSpeed's contiguous buffers were configured.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed

    CHECKPOINT.apply(functools.partial(_packing_function, deepspeed))
    with compressed_checkpoints():
        yield


def compress_inputs(module: torch.nn.Module) -> None:
    """Runs every forward pass of `module` in `compressed`."""
    forward = module.forward
    # not hooks, because torch runs none after a KeyboardInterrupt; and no closure, because a copy of the
    # module must call its own forward
    module.forward = functools.update_wrapper(functools.partial(_in_compressed, forward), forward)


def keep_inputs(module: torch.nn.Module) -> None:
    """Undoes `compress_inputs`, if it was done."""
    forward = vars(module).get("forward")
    if isinstance(forward, functools.partial) and forward.func is _in_compressed:
        del module.forward
        if module.forward != forward.args[0]:
            # for example the forward of a converted layer
            module.forward = forward.args[0]


def _in_compressed(forward: Callable, *args, **kwargs):
    with compressed():
        return forward(*args, **kwargs)


def _packing_function(deepspeed: ModuleType, base: type) -> type:
    class CheckpointFunction(base):
        __doc__ = base.__doc__

        @staticmethod
        def forward(ctx, run_function, all_outputs, *args):
            if not compressing():
                return base.forward(ctx, run_function, all_outputs, *args)
            if deepspeed.CONTIGUOUS_CHECKPOINTING:
                raise CoatConfigError(
                    f"deepspeed.checkpointing.configure(contiguous_checkpointing=True): {CONTIGUOUS}"
                )
            chosen = {id(x): x for x in args if _is_kept(deepspeed, x)}
            for x in chosen.values():
                x.no_checkpointing = True
            try:
                outputs = base.forward(ctx, region(run_function), all_outputs, *args)
            finally:
                for x in chosen.values():
                    del x.no_checkpointing
            stand_ins = {key: _stand_in(deepspeed, x) for key, x in chosen.items()}
            ctx.deepspeed_saved_tensors = tuple(stand_ins.get(id(t), t) for t in ctx.deepspeed_saved_tensors)
            return outputs

    return CheckpointFunction


def _shares(deepspeed: ModuleType) -> int:
    return deepspeed.mp_size if deepspeed.PARTITION_ACTIVATIONS else 1


def _is_kept(deepspeed: ModuleType, x: Any) -> bool:
    """Whether `x` is kept in FP8; DeepSpeed refuses tensors that are not divisible by the number of ranks."""
    return is_activation(x) and not hasattr(x, "no_checkpointing") and x.numel() % _shares(deepspeed) == 0


def _stand_in(deepspeed: ModuleType, x: torch.Tensor) -> torch.Tensor:
    """An empty tensor that DeepSpeed fills in backward with the result of `saved_data.to(device)`."""
    empty = torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True)
    empty.saved_data = _Kept(deepspeed, x)
    # it is filled with the whole tensor: DeepSpeed must not all-gather it
    empty.no_checkpointing = True
    return empty


class _Kept:
    """An input as codes: this rank's share if activations are partitioned; in CPU memory if configured."""

    def __init__(self, deepspeed: ModuleType, x: torch.Tensor):
        self.shape, self.group, self.shares = x.shape, deepspeed.mp_group, _shares(deepspeed)
        if self.shares == 1:
            self.packed = packed(x)
        else:
            flat = x.reshape(-1)
            share = flat.numel() // self.shares
            self.packed = Packed(flat.narrow(0, share * deepspeed.mp_rank, share))
        if deepspeed.CPU_CHECKPOINT:
            self.packed = self.packed.with_codes(*map(_on_cpu, (self.packed.codes, self.packed.exponent)))

    def to(self, device: torch.device) -> torch.Tensor:
        """The decoded input on `device`; a collective call if activations are partitioned."""
        codes, exponent = (t.to(device, non_blocking=True) for t in (self.packed.codes, self.packed.exponent))
        if self.shares == 1:
            return self.packed.with_codes(codes, exponent).unpack()
        codes, exponent = self._gathered(codes), self._gathered(exponent)
        shares = [self.packed.with_codes(c, e).unpack() for c, e in zip(codes, exponent, strict=True)]
        return torch.cat(shares).view(self.shape)

    def _gathered(self, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        import deepspeed.comm as dist

        whole = t.new_empty(self.shares * t.shape[0], t.shape[1])
        dist.all_gather_into_tensor(whole, t, group=self.group)
        return whole.chunk(self.shares)


def _on_cpu(t: torch.Tensor) -> torch.Tensor:
    # on the compute stream, as is the copy back: no synchronization is needed
    copy = torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)
    return copy.copy_(t, non_blocking=True)
