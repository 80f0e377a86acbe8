"""Megatron's parallel linear layers with FP8 matrix products and FP8 inputs kept for backward.

They are Megatron's classes with another product inside: weights, names, initialisation and checkpoints stay
Megatron's, and a stock checkpoint loads.
"""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from coat_kernels.linear import fp8_linear
from coat_kernels.origin import origin_of

from .settings import formats_of

# cuBLASLt's FP8 products want rows of whole 16-byte words
_ALIGNMENT = 16
# which of Megatron's arguments decide the sizes of each layer
_SIZES = {
    "qkv": "--hidden-size, --num-attention-heads, --num-query-groups or --kv-channels",
    "proj": "--hidden-size, --num-attention-heads or --kv-channels",
    "fc1": "--hidden-size or --ffn-hidden-size",
    "fc2": "--hidden-size or --ffn-hidden-size",
}


class _IntoMainGrad(torch.autograd.Function):
    """The weight itself, whose gradient is added to `weight.main_grad` in backward."""

    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        weight = ctx.weight
        weight.main_grad.add_(grad)
        weight.grad_added_to_main_grad = True
        # Megatron's data parallel hook wants to see a gradient and then ignores it, or adds it if asked to
        return torch.zeros_like(grad) if getattr(weight, "zero_out_wgrad", False) else grad


def _owned_by_megatron(weight: torch.Tensor) -> bool:
    """Whether Megatron's DistributedDataParallel collects this weight's gradient in `main_grad`."""
    return (
        weight.requires_grad
        and getattr(weight, "main_grad", None) is not None
        and hasattr(weight, "grad_added_to_main_grad")
        and not hasattr(weight, "__fsdp_param__")
    )


class _CoatLinear:
    """What both linears share, mixed in before Megatron's class.

    Raises ValueError at construction for what is not supported yet (tensor and sequence parallelism, sharded
    weights, deferred embedding gradients), and on a GPU for sizes that are not multiples of 16.
    """

    def __init__(self, input_size: int, output_size: int, *, config, **kwargs):
        name = kwargs.get("tp_comm_buffer_name") or "linear"
        unsupported = {
            "--sequence-parallel": config.sequence_parallel,
            "--tensor-parallel-num-weight-shards above 1": getattr(config, "gtp_weight_remat_size", 1) > 1,
            "--defer-embedding-wgrad-compute": config.defer_embedding_wgrad_compute,
        }
        for argument, found in unsupported.items():
            if found:
                raise ValueError(f"{name}: {argument} is not supported by coat_layer_spec yet; remove it")
        misaligned = [size for size in (input_size, output_size) if size % _ALIGNMENT]
        if misaligned and torch.cuda.is_available():
            raise ValueError(
                f"{name}: FP8 matrix products need sizes that are multiples of {_ALIGNMENT}, found "
                f"{input_size} -> {output_size}. Change {_SIZES.get(name, 'the sizes of the layer')}."
            )
        super().__init__(input_size, output_size, config=config, **kwargs)
        if self.tp_group.size() > 1:
            raise ValueError(
                f"{name}: tensor-parallel size is {self.tp_group.size()}, coat_layer_spec supports only 1 so "
                "far. Use --tensor-model-parallel-size 1, or sdpa_layer_spec for BF16 layers."
            )
        self._formats = formats_of(config)
        self._origin = None

    def forward(self, input_: torch.Tensor, *args, **kwargs):
        # Megatron may wrap the input into another tensor object before `_forward_impl` sees it
        self._origin = origin_of(input_)
        try:
            return super().forward(input_, *args, **kwargs)
        finally:
            self._origin = None

    def _forward_impl(self, input, weight, *, bias=None, output_dtype=None, **_):
        if output_dtype not in (None, input.dtype):
            raise ValueError(f"output_dtype: expected {input.dtype}, that of the input, found {output_dtype}")
        if torch.is_grad_enabled() and _owned_by_megatron(weight):
            weight = _IntoMainGrad.apply(weight)
        return fp8_linear(input, weight, bias, formats=self._formats, origin=self._origin)


class CoatColumnParallelLinear(_CoatLinear, ColumnParallelLinear):
    """Megatron's ColumnParallelLinear (linear_qkv, linear_fc1) in FP8, with the same arguments and names."""


class CoatRowParallelLinear(_CoatLinear, RowParallelLinear):
    """Megatron's RowParallelLinear (linear_proj, linear_fc2) in FP8, with the same arguments and names."""
