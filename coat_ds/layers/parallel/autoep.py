"""FP8 GEMMs for the experts by which DeepSpeed's AutoEP (`expert_parallel`) replaces a model's own.

DeepSpeed brings rows into the order of a rank's experts, and sends the results back. Gate and up are two
parameters, which one GEMM reads: they are concatenated when it quantizes them, and not kept.
"""

import sys
from typing import Any

import torch

from coat_ds.config import ActivationsConfig
from coat_ds.layers.modules.converted_forward import ConvertedForward, can_be_read
from coat_ds.log import log_once
from coat_ds.optim.shards import shape_of
from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.experts import ExpertsState, KernelGate, TorchGate, permuted_experts
from coat_kernels.fp8 import ALIGNMENT
from coat_kernels.weights import WeightCache

# DeepSpeed's names of activations that are kernels
_KINDS = {"swiglu": "silu", "geglu_tanh": "gelu_tanh"}


def _deepspeed() -> Any:
    """DeepSpeed's module of AutoEP's experts; None if it is not imported, since no such layer exists then."""
    return sys.modules.get("deepspeed.moe.ep_experts")


def is_autoep(module: torch.nn.Module) -> bool:
    """Whether `module` holds a rank's experts of AutoEP."""
    return _deepspeed() is not None and type(module).forward is _deepspeed().GroupedExperts.forward


def why_not(module: torch.nn.Module) -> str | None:
    """Why experts keep their forward; None if they can be converted."""
    _, h, f = shape_of(module.w2)
    if h % ALIGNMENT or f % ALIGNMENT:
        return f"experts of {h} x {f}, not multiples of {ALIGNMENT}"
    return None


class _Halves(WeightCache):
    """Quantizes gate and up of a module as one weight [e, 2 f, h]; the tensor that it gets is a stand-in."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def __reduce__(self):
        return type(self), (self.module,)

    def forward(self, weights, trains=True):
        return super().forward(self._whole(), trains)

    def columns(self, weights, amax):
        return super().columns(self._whole(), amax)

    def _whole(self) -> tuple[torch.Tensor]:
        return (torch.cat((self.module.w1.detach(), self.module.w3.detach()), dim=1),)


class _StandIn(torch.autograd.Function):
    """A tensor with the shape of gate and up together, and one element of memory. Its gradient is theirs."""

    @staticmethod
    def forward(ctx, gate, up):
        e, f, h = gate.shape
        return gate.new_zeros(()).expand(e, 2 * f, h)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.chunk(2, dim=1)


class AutoEPExperts(ConvertedForward):
    """The forward of a rank's experts: w1 and w3 [e, f, h], w2 [e, h, f]."""

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig):
        super().__init__(module, activations)
        fast = activations.fast_accumulation != "none"
        if activations.weight_cache != "none":
            log_once(
                f"{activations.KEY}.weight_cache: gate and up are two weights of AutoEP's experts and "
                "are quantized in each pass. Copies of other weights are kept."
            )
        self.state = ExpertsState(activations.weight_cache, fast)
        self.state.gate_up = _Halves(module)

    def shown(self) -> str:
        return "coat=FP8, 8-bit saved"

    def _gate(self, both: torch.Tensor) -> torch.Tensor:
        """DeepSpeed's activation, of both halves [n, 2 f]."""
        module = self.module
        act = module.activation, module.activation_alpha, module.activation_limit
        return _deepspeed().apply_expert_activation(*both.chunk(2, dim=1), *act, fused=False)

    # a gate that is differentiated in backward cannot be traced, nor can predicted scales
    @torch.compiler.disable
    def compute(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """x [n, h] in the order of the experts, and how many rows each has [e] -> [n, h]. Rows after the last
        expert's are zero, and so are their results."""
        module = self.module
        if not (x.numel() and self.check_tensor(x) and can_be_read(module.w1)):
            return self.stock(x, num_tokens_per_expert)
        gate = TorchGate(self._gate, saved_format=self.saved_format)
        if module.activation in _KINDS:
            gate = KernelGate(_KINDS[module.activation], saved_format=self.saved_format)
        # the last expert computes them, too
        rows = num_tokens_per_expert.clone()
        rows[-1] += len(x) - rows.sum()
        y = permuted_experts(
            x.to(torch.bfloat16),
            rows,
            torch.ones(len(x), dtype=torch.bfloat16, device=x.device),
            _StandIn.apply(module.w1, module.w3),
            module.w2,
            gate,
            state=self.state,
        )
        return y.to(x.dtype)
