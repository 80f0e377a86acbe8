"""Codes over many steps: a quick run, and figures whose exact value is known."""

import pytest
import torch
import triton.language as tl

from benchmarks.common.state_codes import cases
from benchmarks.state_loop.loop import BETA2
from benchmarks.state_loop.models import MODELS
from tests.benchmarks.dry import rows_of


@pytest.mark.long("a benchmark's dry run")
def test_every_code_has_a_row_for_each_model_beta2_and_kind_of_matrix(tmp_path):
    rows = rows_of(tmp_path / "state_loop.csv", "state_loop", "--quick", "--work", str(tmp_path))
    kinds = {(row["model"], row["kind"]) for row in rows}
    assert kinds >= {(model, kind) for model in MODELS for kind in ("embedding", "attention", "MLP", "all")}
    # a tied embedding is the head, and all its rows have gradients
    assert ("smollm2", "head") not in kinds and ("smollm2", "rare rows") not in kinds
    assert ("rare", "rare rows") in kinds
    ages = {(row["model"], row["after"]) for row in rows}
    assert ages == {(model, "3") for model in MODELS} | {("125m", "5")}
    names = {(row["model"], row["code"], float(row["beta2"])) for row in rows if row["kind"] == "all"}
    assert names == {(model, name, beta2) for model in MODELS for beta2 in BETA2 for name in cases(beta2)}
    error = {
        (row["code"], row["beta2"]): float(row["stored"])
        for row in rows
        if (row["model"], row["kind"]) == ("small", "all")
    }
    # E4M3 encodes the magnitude in four of its eight bits, ratio8 and log8 in all eight
    assert error["ratio8, log8", "0.95"] < 0.5 * error["fp8_expanded, fp8_expanded", "0.95"]
    # BF16 rounds each moment by 2^-9 at most, uniformly
    assert error["bf16, bf16", "0.95"] < 2**-9


def moments() -> tuple[torch.Tensor, torch.Tensor]:
    """Moments over nine decades, with zeros, and with second moments below the smallest scales."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-11, -2, 64)[:, None]
    m = torch.randn(64, 256, generator=generator) * scale
    v = (torch.randn(64, 256, generator=generator) * scale).square()
    m[0] = v[0] = 0
    return m.view(-1), v.view(-1)


def test_torchaos_codes_are_torchaos():
    states = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit
    fp8 = pytest.importorskip("torchao.optim.subclass_fp8").OptimStateFp8
    m, v = moments()

    def through(state, x):
        return state.copy_(x).dequantize()

    found = cases(0.95)["torchao 8-bit"].code(m, v, 1)
    for x, y, signed in zip(found, (m, v), (True, False), strict=True):
        assert torch.equal(x, through(states.zeros(y.shape, signed=signed), y))
    for x, y in zip(cases(0.95)["torchao FP8"].code(m, v, 1), (m, v), strict=True):
        assert torch.equal(x, through(fp8.zeros(y.shape), y))


def test_flashoptims_code_is_flashoptims():
    kernels = pytest.importorskip("flashoptim.optimizers")
    m, v = moments()

    def through(x, dtype, code, largest, sqrt, softsign):
        """Runs its kernels without their tuning, which needs a GPU."""
        codes, scales, y = x.to(dtype), torch.empty(x.numel() // 32, dtype=torch.float16), torch.empty_like(x)
        of = {"GROUP_SIZE": 32, "SQRT": sqrt, "SOFTSIGN": softsign, "BLOCK_SIZE_N": 1024}
        grid = (x.numel() // 1024,)
        kernels._triton_quantize_kernel.fn[grid](x, codes, scales, x.numel(), largest, code, **of)
        kernels._triton_dequantize_kernel.fn[grid](codes, scales, y, x.numel(), largest, **of)
        return y

    first, second = cases(0.95)["FlashOptim"].code(m, v, 1)
    assert torch.equal(first, through(m, torch.int8, tl.int8, 127.0, False, True))
    assert torch.equal(second, through(v, torch.uint8, tl.uint8, 255.0, True, False))
