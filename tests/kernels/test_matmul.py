"""FP8 GEMMs that accumulate into a tensor: kernels against references, and the choice of the kernel."""

import pytest
import torch

from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.linear import matmul
from coat_kernels.tensorwise import quantize_tensor, tensor_amax
from tests.kernels.agreement import FAST_TERM
from tests.kernels.inputs import hard
from tests.util import rel_rms

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="the kernel is Hopper's")
# at most one tile, partial in every dimension, with two groups of rows; the last shape, too slow for the
# interpreter, has more tiles than a GPU has multiprocessors
RAGGED = [(16, 16, 16), (128, 256, 128), (144, 272, 144), (1168, 528, 48)]
RAGGED += [(13 * 128 - 112, 11 * 256 - 112, 400)] if HOPPER else []
SCALES = 0.25, 2.0**-9


def integers(rows: int, t: int, fmt, device) -> torch.Tensor:
    """Codes of -2 to 2: sums of up to 400 products have at most 11 bits, in any order."""
    return torch.randint(-2, 3, (rows, t), device=device).to(fmt.dtype)


def scales(device):
    return [torch.tensor([scale], device=device) for scale in SCALES]


def quantized(x, y, fmt):
    """Codes of `x` in `fmt` and of `y` in E4M3, and their scales."""
    a, b = quantize_tensor(x, tensor_amax(x), fmt), quantize_tensor(y, tensor_amax(y), E4M3)
    return a.rows, b.rows, a.scale, b.scale


def guarded(n: int, k: int, dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    """An integer tensor [n, k], and its storage with four rows of ones before and after it."""
    whole = torch.ones(n + 8, k, dtype=dtype, device=device)
    whole[4:-4] = torch.randint(-9, 10, (n, k), device=device)
    return whole[4:-4], whole


@on_hopper
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("n, k, t", RAGGED)
def test_matmul_kernel_adds_the_exact_product(n, k, t, fmt, device):
    a, b = integers(n, t, fmt, device), integers(k, t, E4M3, device)
    out, whole = guarded(n, k, torch.float32, device)
    # in units of the product of the two scales, so that nothing is rounded
    unit = SCALES[0] * SCALES[1]
    out *= unit
    expected = out.double() + 2 * unit * (a.double() @ b.double().t())
    for _ in range(2):
        matmul.accumulate_matmul_triton(a, b, *scales(device), out)
    assert out.double().equal(expected)
    assert (whole[:4] == 1).all() and (whole[-4:] == 1).all()


@on_hopper
@pytest.mark.parametrize("accumulate", [matmul.accumulate_matmul_reference, matmul.accumulate_matmul_triton])
def test_matmul_of_zeros_adds_nothing(accumulate, device):
    b = integers(272, 32, E4M3, device)
    out = torch.randn(144, 272, device=device)
    out[5, 7], out[6, 8] = -torch.inf, torch.nan
    before = out.clone()
    accumulate(torch.zeros(144, 32, device=device).to(E5M2.dtype), b, *scales(device), out)
    torch.testing.assert_close(out, before, rtol=0, atol=0, equal_nan=True)


@on_hopper
@pytest.mark.parametrize(
    "accumulate",
    [
        matmul.accumulate_matmul_reference,
        # the interpreter makes numbers of NaN codes
        pytest.param(matmul.accumulate_matmul_triton, marks=pytest.mark.gpu),
    ],
)
def test_matmul_nan_spoils_its_row_or_column(accumulate, device):
    a, b = integers(144, 32, E5M2, device), integers(272, 32, E4M3, device)
    a[3, 4] = b[9, 31] = torch.nan
    out = torch.randn(144, 272, device=device)
    accumulate(a, b, *scales(device), out)
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[3] = spoilt[:, 9] = True
    assert out.isnan().equal(spoilt)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_matmul_fast_sums(fmt):
    """Products of two FP8 numbers are exact."""
    t = 2048
    x, y = torch.randn(512, t, device="cuda"), torch.randn(768, t, device="cuda")
    a, b, scale_a, scale_b = quantized(x, y, fmt)
    out = torch.zeros(512, 768, device="cuda")
    matmul.accumulate_matmul_triton(a, b, scale_a, scale_b, out)
    expected = (a.double() @ b.double().t()) * scale_a * scale_b
    assert rel_rms(out, expected) < t * FAST_TERM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fast", [False, True])
def test_matmul_rounds_its_product(fast, dtype, device):
    """Fast sums are added to FP32 without rounding on a CPU and for a large GEMM; all other results are
    rounded."""
    x, y = torch.randn(2, 48, 64, device=device)
    operands = quantized(x, y, E5M2)
    out = torch.randn(48, 48, device=device).to(dtype)
    exact, rounded = out.clone(), out.clone()
    if dtype == torch.float32:
        matmul.accumulate_matmul_reference(*operands, exact)
    rounded.add_(matmul.scaled_matmul(*operands, None, torch.bfloat16, fast))
    matmul.accumulate_matmul(*operands, out, torch.bfloat16, fast)
    in_one_pass = fast and dtype == torch.float32 and device.type == "cpu"
    assert out.equal(exact if in_one_pass else rounded) and not exact.equal(rounded)


@pytest.mark.gpu
@on_hopper
def test_matmul_of_large_products_takes_the_kernel_where_it_can(monkeypatch):
    calls = []
    kernel = matmul.accumulate_matmul_triton
    monkeypatch.setattr(matmul, "accumulate_matmul_triton", lambda *args: calls.append(args) or kernel(*args))
    device = torch.device("cuda")
    tiles = matmul.TILES_PER_PROCESSOR * matmul.multiprocessors(device)
    k, t = 16 * matmul.K_TILE, 32
    n = -(-tiles // 16) * matmul.N_TILE
    memory = torch.zeros(n * k + 4, device=device)
    packed, aside = memory[: n * k].view(n, k), memory[1 : n * k + 1].view(n, k)
    strided = torch.zeros(n, 2 * k, device=device)[:, :k]
    operands = [integers(n, t, E5M2, device), integers(k, t, E4M3, device), *scales(device)]
    # sums of at most 128 are exact in BF16 too
    product = matmul.scaled_matmul(*operands, None, torch.float32, False)
    small = [operands[0][: n // 2], *operands[1:]]
    for out, given, fast, taken in (
        (packed, operands, True, True),
        (packed, operands, False, False),
        (packed[: n // 2], small, True, False),
        (aside, operands, True, False),
        (strided, operands, True, False),
        (packed.bfloat16(), operands, True, False),
    ):
        out.zero_()
        calls.clear()
        matmul.accumulate_matmul(*given, out, torch.bfloat16, fast)
        assert out.float().equal(product[: len(out)]) and bool(calls) == taken


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matmul_added_tensors_equal_torchs_bit_for_bit(dtype, of, device):
    for n in (1, 4095, 4096, 4097):
        cases = list(hard(n).values())
        for first, second in zip(cases, cases[1:] + cases[:1], strict=True):
            whole, whole_x = torch.ones(n + 16, dtype=dtype), torch.ones(n + 16, dtype=of)
            whole[8:-8], whole_x[8:-8] = first, second
            expected = whole.clone()
            expected[8:-8] += whole_x[8:-8]
            whole, whole_x = whole.to(device), whole_x.to(device)
            matmul.add_triton(whole[8:-8], whole_x[8:-8])
            torch.testing.assert_close(whole.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_matmul_operator_passes_opcheck(device):
    a = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
    # torch's schema test would multiply FP8 elements, which torch does not support
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for fast in (False, True):
        arguments = a, a, *scales(device), torch.zeros(16, 16, device=device), torch.bfloat16, fast
        torch.library.opcheck(matmul.accumulate_matmul.op, arguments, test_utils=utils)
