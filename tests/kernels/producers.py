"""Kernels that write the FP8 operands of the next GEMM: their operands, and the same tensor in BF16."""

import torch

from coat_kernels import activation as act
from coat_kernels import norm, rope
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.tensorwise import PredictedScale
from coat_kernels.tensorwise.quantize import Quantized

KEEP = "sqrt8"


class Norm:
    """A norm. With `adds`, the kernel also computes the sum that it normalizes."""

    fmt, sums, adds = E4M3, False, False

    def __init__(self, device, rows=21, h=48):
        self.x, self.branch = torch.randn(2, rows, h, device=device, dtype=torch.bfloat16)
        self.weight, self.bias = torch.randn(2, h, device=device)

    def _options(self):
        return norm.op.NormOptions(1e-5, True, False, KEEP)

    def plain(self) -> torch.Tensor:
        x = norm.residual.residual_add_reference(self.x, self.branch) if self.adds else self.x
        return norm.op.norm_forward(x, self.weight, self.bias, *self._options())[0]

    def operands(self, scale: PredictedScale) -> Quantized:
        how = self.weight, self.bias, self._options(), scale
        if not self.adds:
            return norm.op.norm_operands(self.x, *how)[0]
        total = torch.empty_like(self.x)
        written = norm.op.norm_operands(total, *how, addends=norm.residual.Addends(self.x, self.branch))[0]
        assert total.equal(norm.residual.residual_add_reference(self.x, self.branch))
        return written


class SumNorm(Norm):
    adds = True


class Activation:
    fmt, sums = E4M3, False
    options = act.ActivationOptions("silu", True, KEEP)

    def __init__(self, device, rows=21, f=48):
        self.x = torch.randn(rows, 2 * f, device=device, dtype=torch.bfloat16)
        self.grad = torch.randn(rows, f, device=device, dtype=torch.bfloat16)

    def plain(self) -> torch.Tensor:
        return act.op.activation_forward(self.x, *self.options)[0]

    def operands(self, scale: PredictedScale) -> Quantized:
        return act.op.activation_operands(self.x, self.options, scale)[0]


class ActivationGradient(Activation):
    fmt, sums = E5M2, True

    def _kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        return act.op.activation_forward(self.x, *self.options)[2:]

    def plain(self) -> torch.Tensor:
        return act.op.activation_backward(self.grad, *self._kept(), *self.options)[0]

    def operands(self, scale: PredictedScale) -> Quantized:
        return act.op.activation_backward_operands(self.grad, self._kept(), self.options, scale, True)


class RotationGradient:
    fmt, sums = E5M2, True

    # tokens, batch, groups, queries in a group, channels
    def __init__(self, device, shape=(3, 3, 1, 2, 16)):
        s, b, groups, m, d = shape
        grads = [torch.randn(b, s, n, d, device=device).bfloat16() for n in (groups * m, groups, groups)]
        # not contiguous, like the gradients from attention's backward
        self.grads = [grad.transpose(0, 1) for grad in grads]
        angles = torch.rand(s, d // 2, device=device).repeat(1, 2)
        self.tables = angles.cos(), angles.sin()

    def plain(self) -> torch.Tensor:
        return rope.op.rotate_qkv_backward(*self.grads, *self.tables)[0].flatten(0, 1)

    def operands(self, scale: PredictedScale) -> Quantized:
        return rope.op.rotate_qkv_backward_operands(*self.grads, *self.tables, scale, True)


PRODUCERS = {
    "norm": Norm,
    "norm of a sum": SumNorm,
    "activation": Activation,
    "activation's gradient": ActivationGradient,
    "rotation's gradient": RotationGradient,
}
