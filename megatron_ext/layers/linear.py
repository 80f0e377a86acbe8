"""Megatron's parallel linear layers with FP8 GEMMs and FP8 inputs saved for backward.

They are Megatron's classes with another GEMM inside: weights, names, initialisation and checkpoints stay
Megatron's, and a stock checkpoint loads.
"""

import copy
import functools

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from coat_ds.config import ActivationsConfig
from coat_ds.layers.conversion import describe_gemms
from coat_ds.layers.inventory import Part
from coat_ds.layers.modules.attention import attended_origin
from coat_ds.layers.modules.converted_forward import is_evaluated
from coat_ds.layers.modules.hooks import forget_if_pre_hooked
from coat_ds.layers.modules.linear import Gemm
from coat_ds.log import log_once
from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.autograd.origin import Origin, maxima_of, origin_of, with_maxima
from coat_kernels.fp8 import ALIGNMENT
from coat_kernels.linear import LinearOptions, fp8_linear
from coat_kernels.parallel import TensorParallel
from megatron_ext.layers.settings import Configurable
from megatron_ext.options import layer_activations

_Q_HEADS = "--num-attention-heads, --qk-head-dim or --qk-pos-emb-head-dim"
# Megatron's arguments that determine the sizes of each layer
_SIZES = {
    "qkv": "--hidden-size, --num-attention-heads, --num-query-groups or --kv-channels",
    "q_proj": f"--hidden-size, {_Q_HEADS}",
    "q_down_proj": "--hidden-size or --q-lora-rank",
    "q_up_proj": f"--q-lora-rank, {_Q_HEADS}",
    "kv_down_proj": "--hidden-size, --kv-lora-rank or --qk-pos-emb-head-dim",
    "kv_up_proj": "--kv-lora-rank, --num-attention-heads, --qk-head-dim or --v-head-dim",
    "proj": "--hidden-size, --num-attention-heads, --kv-channels or --v-head-dim",
    "fc1": "--hidden-size or --ffn-hidden-size",
    "fc2": "--hidden-size or --ffn-hidden-size",
}
# measured with "qkv": if the input has outliers, fast accumulation multiplies the error of this weight's
# gradient by 1.3, and does not increase the errors of other weights' gradients
_PRECISE_WGRAD = frozenset(("qkv", "q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj"))


def without_accumulation_fusion(config):
    """`config` without `--gradient-accumulation-fusion`: Megatron's fusion needs apex's kernel, COAT's
    none."""
    changed = copy.copy(config)
    changed.gradient_accumulation_fusion = False
    return changed


class _IntoMainGrad(torch.autograd.Function):
    """Identity for a weight, for a wgrad GEMM that adds to `weight.main_grad`."""

    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight = ctx.weight
        weight.grad_added_to_main_grad = True
        # Megatron's data parallel hook requires a gradient and then ignores it, or adds it if
        # `zero_out_wgrad` is set. Return a real tensor: autograd would materialise an expanded one anyway,
        # and the operands are freed by now.
        adds = getattr(weight, "zero_out_wgrad", False)
        return (torch.zeros_like if adds else torch.empty_like)(weight)


def _owned_by_megatron(weight: torch.Tensor) -> bool:
    """Whether Megatron's DistributedDataParallel collects this weight's gradient in `main_grad`."""
    return (
        weight.requires_grad
        and getattr(weight, "main_grad", None) is not None
        and hasattr(weight, "grad_added_to_main_grad")
        and not hasattr(weight, "__fsdp_param__")
    )


class _CoatLinear(Configurable):
    """The common part of both linears, mixed in before Megatron's class.

    On a GPU a layer stays Megatron's if its sizes per rank are not multiples of 16.
    """

    _by_output: bool

    def __init__(self, input_size: int, output_size: int, *, config, **kwargs):
        super().__init__(input_size, output_size, config=without_accumulation_fusion(config), **kwargs)
        self.config = config
        self._complete(kwargs.get("tp_comm_buffer_name") or "linear")

    @classmethod
    def take_over(cls, linear: torch.nn.Module, name: str) -> None:
        """Turns Megatron's linear layer into one of this class, where Megatron hard-codes the class."""
        linear.__class__ = cls
        linear._complete(name)

    def _complete(self, name: str) -> None:
        self._name, self._quant_config = name, None
        if self._by_output:
            sizes = self.input_size, self.output_size_per_partition
        else:
            sizes = self.input_size_per_partition, self.output_size
        # the reference takes any size
        self._fits = not torch.cuda.is_available() or not any(size % ALIGNMENT for size in sizes)
        if not self._fits:
            ranks = self.tp_group.size()
            each = f" on each of {ranks} tensor-parallel ranks" if ranks > 1 else ""
            log_once(
                f"{name}: FP8 GEMMs need sizes that are multiples of {ALIGNMENT}, found {sizes[0]} -> "
                f"{sizes[1]}{each}. The layer stays Megatron's. Change "
                f"{_SIZES.get(name, 'the sizes of the layer')}."
            )
        self.apply_activations(ActivationsConfig())
        # the input's notes, for `_forward_impl`
        self._attached: dict = {}

    def finish_init(self, quant_config) -> None:
        """Applies the options of this layer in Megatron's `--te-precision-config-file`, once the model is
        built.

        Raises CoatConfigError for a key or value that linear layers do not support.
        """
        self._quant_config = quant_config
        self.apply_activations(self.activations)

    def apply_activations(self, activations: ActivationsConfig) -> None:
        super().apply_activations(activations)
        activations = layer_activations(self._quant_config, activations)
        self._in_fp8 = self._fits and activations.enabled
        self._evaluates_stock = activations.evaluation == "stock"
        self._gemm = Gemm(activations, self._name in _PRECISE_WGRAD)

    def multiplies_in_fp8(self) -> bool:
        """Whether a forward computes in FP8 now."""
        return self._in_fp8 and not (self._evaluates_stock and is_evaluated(self))

    def weight_and_options(
        self, weight: torch.Tensor | None = None, sequence: bool | None = None
    ) -> tuple[torch.Tensor, LinearOptions]:
        """The weight and how it multiplies, with this layer's ranks, and with the tensor that Megatron
        collects the weight's gradient in.

        weight: the layer's own by default. sequence: whether the GEMM gathers or scatters tokens; by
            default as under sequence parallelism.
        """
        weight, buffer, parallel = self.weight if weight is None else weight, None, None
        if _owned_by_megatron(weight):
            # looked up in backward: Megatron may have replaced it by then
            buffer = functools.partial(getattr, weight, "main_grad")
            weight = _IntoMainGrad.apply(weight)
        if self.tp_group.size() > 1 and not self.explicit_expert_comm:
            sequence = self.sequence_parallel if sequence is None else sequence
            reduces = self._by_output and self.allreduce_dgrad
            parallel = TensorParallel(self.tp_group, self._by_output, sequence, reduces)
        return weight, self._gemm.options(weight, parallel, buffer)

    def coat_part(self) -> Part:
        if self._in_fp8:
            return Part("linear", describe_gemms(self._gemm.formats.backward.name, self.activations))
        why = "--te-precision-config-file" if self._fits else f"sizes that {ALIGNMENT} does not divide"
        return Part("linear", None, why)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the copies of the weight that are held now."""
        return self._gemm.cache.nbytes

    def forward(self, input_: torch.Tensor, *args, **kwargs):
        forget_if_pre_hooked(self, input_)
        # Megatron may wrap the input in another tensor object before `_forward_impl` runs
        self._attached.update(origin=_origin(input_), maxima=maxima_of(input_))
        try:
            return super().forward(input_, *args, **kwargs)
        finally:
            self._attached.clear()

    def _forward_impl(self, input, weight, *, bias=None, output_dtype=None, **rest):
        # an expert without tokens has nothing to multiply
        if not self.multiplies_in_fp8() or input.numel() == 0:
            if output_dtype is not None:
                rest["output_dtype"] = output_dtype
            return super()._forward_impl(input=input, weight=weight, bias=bias, **rest)
        if output_dtype not in (None, input.dtype):
            raise ValueError(f"output_dtype: expected {input.dtype}, that of the input, found {output_dtype}")
        # Megatron sums the output of a row-parallel layer itself
        sequence = self._by_output and self.sequence_parallel
        return self._multiply(input, weight, bias, sequence, **self._attached)

    def _multiply(self, input, weight, bias, sequence: bool, origin=None, maxima=None) -> torch.Tensor:
        weight, options = self.weight_and_options(weight, sequence)
        if maxima is not None:
            with_maxima(input, maxima)
        return fp8_linear(input, weight, bias, options, origin=origin)


class CoatColumnParallelLinear(_CoatLinear, ColumnParallelLinear):
    """Megatron's ColumnParallelLinear (linear_qkv, linear_fc1) in FP8, with the same arguments and names.

    Under sequence parallelism its input is all-gathered in FP8.
    """

    _by_output = True


class CoatRowParallelLinear(_CoatLinear, RowParallelLinear):
    """Megatron's RowParallelLinear (linear_proj, linear_fc2) in FP8, with the same arguments and names.

    Under sequence parallelism the gradient of its output is all-gathered in FP8.
    """

    _by_output = False

    def forward(self, input_: torch.Tensor):
        whole = self.tp_group.size() == 1
        scatters = self.sequence_parallel and not whole and not self.explicit_expert_comm
        # Megatron adds the bias after the sum over the ranks; the GEMM of a whole weight can add it
        bias = self.bias if whole and not self.skip_bias_add else None
        if not (self.multiplies_in_fp8() and input_.numel() and (scatters or whole)):
            return super().forward(input_)
        forget_if_pre_hooked(self, input_)
        # the reduce-scatter belongs to the GEMM: its backward all-gathers what it quantized
        output = self._multiply(input_, self.weight, bias, scatters, _origin(input_))
        if bias is not None or self.bias is None:
            return output, None
        return (output, self.bias) if self.skip_bias_add else (output + self.bias, None)


def _origin(x: torch.Tensor) -> Origin | None:
    """The origin of `x`, which may be a view of attention's output."""
    return origin_of(x) or attended_origin(x)


def add_bias_in_gemm(linear: torch.nn.Module) -> None:
    """Makes a row-parallel layer that holds the whole weight add its bias in its GEMM, not in Megatron's
    bias-dropout-add. The pass that quantizes the gradient then also sums the bias's gradient."""
    if isinstance(linear, CoatRowParallelLinear) and linear.tp_group.size() == 1:
        # Megatron's experts require the opposite
        linear.skip_bias_add = linear.explicit_expert_comm
