"""The residual addition fused into the norm equals the separate addition followed by the norm."""

import pytest
import torch

from coat_kernels import norm, tensorwise
from coat_kernels.fp8 import E4M3
from coat_kernels.groups.reference import GROUP_SIZE, dequantize_groups_reference
from coat_kernels.norm import residual
from coat_kernels.norm.op import NormOptions, norm_operands
from coat_kernels.norm.residual import Addends, residual_add_reference
from coat_kernels.tensorwise import PredictedScale
from tests.kernels.agreement import close, same
from tests.kernels.inputs import EPS, LAYER_NORM, SHAPES, hard, wide


@pytest.fixture
def kernels(takes_kernels, monkeypatch):
    """Runs a test with the references and with the kernels, which then compute every sum."""
    if takes_kernels:
        monkeypatch.setattr(norm.op, "uses_kernels", lambda x: True)
        monkeypatch.setattr(norm.kernels, "FORWARD_TILE", 1024)
        monkeypatch.setattr(tensorwise.scale, "CORRECTING_PROGRAMS", 3)
        monkeypatch.setattr(norm.op, "residual_add_reference", None)
        monkeypatch.setattr(residual, "residual_add_reference", None)
    return takes_kernels


def check(tensors, layer_norm, *, zero_centered=False, keep="sqrt8"):
    *addends, weight, bias = tensors
    how = weight, bias, NormOptions(EPS, layer_norm, zero_centered, keep)
    total = residual_add_reference(*addends)
    scale = PredictedScale(E4M3)
    expected, amax, q, rstd = norm_operands(total, *how, scale)
    # 1 is a wrong prediction; the first run leaves the right one
    for predicted in (1.0, scale.on(total.device).item()):
        scale.on(total.device).fill_(predicted)
        summed = torch.empty_like(total)
        found, amax, kept, found_rstd = norm_operands(summed, *how, scale, addends=Addends(*addends))
        same(summed, total)
        assert found.scale.equal(expected.scale) and amax.equal(amax)
        close(found.rows.float(), expected.rows.float())
        close(found_rstd, rstd)
        close(*(dequantize_groups_reference(g, GROUP_SIZE) for g in (kept, q)))


def inputs(shape, biased, layer_norm, device, dtype=torch.bfloat16):
    branch_bias = torch.randn(shape[-1], device=device).to(dtype) if biased else None
    weight, norm_bias = torch.randn(2, shape[-1], device=device)
    addends = [wide(*shape).to(device, dtype) for _ in range(2)]
    return *addends, branch_bias, weight, norm_bias if layer_norm else None


@pytest.mark.pairwise
@LAYER_NORM
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_residual_norm_is_the_plain_addition(shape, layer_norm, device, kernels):
    check(inputs(shape, layer_norm, layer_norm, device), layer_norm, zero_centered=True)


@LAYER_NORM
def test_residual_norm_is_the_plain_addition_in_fp32(layer_norm, device, kernels):
    tensors = inputs((21, 48), True, layer_norm, device, torch.float32)
    check(tensors, layer_norm, keep="e4m3")


@pytest.mark.parametrize("case", hard(64))
def test_residual_norm_is_the_plain_addition_of_hard_inputs(case, device, kernels):
    """Hard inputs in one row of each addend, in one row of both, and in all rows through the bias."""
    for residual_row, branch_row, biased in ((1, 2, False), (1, 1, False), (1, 1, True)):
        tensors = inputs((4, 64), biased, False, device)
        for t, row in zip(tensors, (residual_row, branch_row), strict=False):
            t[row] = hard(64)[case].to(t)
        if biased:
            tensors[2].copy_(hard(64)[case])
        check(tensors, False)
