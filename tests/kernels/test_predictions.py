"""Codes written with a predicted scale: the same as with the right scale, whatever the prediction."""

import copy
import pickle

import pytest
import torch

from coat_kernels import tensorwise
from coat_kernels.autograd.origin import with_maxima
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.tensorwise import PredictedScale
from coat_kernels.tensorwise.operands import fp8_operands
from tests.interpreter import take_kernels
from tests.kernels.agreement import same
from tests.kernels.inputs import check_sums, hard
from tests.kernels.producers import PRODUCERS
from tests.util import default_dtype

pytestmark = pytest.mark.early


def test_prediction_changes_no_result(producer, kernels, device):
    plain, scale = producer.plain(), PredictedScale(producer.fmt)
    amax = tensorwise.tensor_amax(plain)
    columns = producer.sums
    expected = tensorwise.quantize.quantize_tensor_reference(
        plain, amax, producer.fmt, True, columns, columns
    )
    # "right" is the scale that the previous run leaves; each run takes 2 s in the interpreter, and a test of
    # plain tensors covers the other PREDICTIONS
    for predicted in PREDICTIONS if device.type == "cuda" else (2.0**-40, "right", torch.nan):
        if predicted != "right":
            scale.on(device).fill_(predicted)
        found = producer.operands(scale)
        same(found.rows, expected.rows)
        assert found.scale.equal(expected.scale)
        if producer.sums:
            same(found.columns, expected.columns)
            check_sums(found.sums, plain)


PREDICTIONS = (2.0**-40, "right", 2.0**40, torch.nan, 0.0, torch.inf)
LAYOUTS = pytest.mark.parametrize("layouts", [(True, False), (False, True), (True, True)], ids=str)


@pytest.fixture
def small_tiles(monkeypatch):
    """Quantizing kernels have several tiles, including partial ones."""
    for module in (tensorwise.scale, tensorwise.quantize):
        monkeypatch.setattr(module, "BLOCK", 64)
    for module in (tensorwise.transpose, tensorwise.quantize):
        monkeypatch.setattr(module, "COLUMNS_TILE", (32, 16))
    monkeypatch.setattr(tensorwise.quantize, "BOTH_TILE", (16, 32))


@pytest.mark.pairwise
@LAYOUTS
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prediction_changes_no_code_of_a_plain_tensor(
    dtype, fmt, layouts, takes_kernels, kernels, small_tiles, device
):
    scale = PredictedScale(fmt)
    broken = torch.stack([*hard(40).values()])
    for x in (torch.randn(3, 7, 40), broken):
        x = x.to(device, dtype)
        flat = x.flatten(0, -2)
        amax = tensorwise.tensor_amax(flat)
        expected = tensorwise.quantize.quantize_tensor_reference(flat, amax, fmt, *layouts, sums=True)
        for i, predicted in enumerate(PREDICTIONS):
            if predicted != "right":
                scale.on(device).fill_(predicted)
            out, found = fp8_operands(x, fmt, *layouts, sums=i % 3 == 0, predicted=scale)
            assert found.equal(amax)
            for a, e in zip(out[:3], expected[:3], strict=True):
                assert a is e is None or not same(a, e)
            # references do not update the prediction
            assert scale.on(device).equal(expected.scale) or not takes_kernels
            if i % 3 == 0:
                check_sums(out.sums, flat)


@LAYOUTS
def test_prediction_that_is_right_leaves_the_codes_alone(layouts, small_tiles, device):
    """The codes of the first launch are unchanged after the second launch."""
    x = torch.randn(50, 40, device=device)
    scale, first = PredictedScale(E4M3), []

    def codes_of(out):
        return next(t for t in out if t is not None).view(torch.uint8)

    def write(out, scales):
        maxima = tensorwise.quantize.launch_quantize(x, out, scales)
        if not scales.corrects:
            first.append(codes_of(out).clone())
            codes_of(out).zero_()
        return maxima

    rows, columns = layouts
    for written in (True, False):
        out, _ = tensorwise.predicted.quantize_predicted(
            write, scale, (50, 40), device, rows=rows, columns=columns
        )
        assert codes_of(out).any() == written
        assert written or first[-1].any()


def test_prediction_is_saved_by_known_maxima(small_tiles, device, monkeypatch):
    """The quantizing launch reads a few maxima; the largest of many maxima is found before it."""
    take_kernels(monkeypatch)
    monkeypatch.setattr(tensorwise.operands, "quantize_predicted", None)
    reduced = []
    amax_triton = tensorwise.scale.amax_triton
    monkeypatch.setattr(
        tensorwise.scale, "amax_triton", lambda maxima: reduced.append(maxima) or amax_triton(maxima)
    )
    scale = PredictedScale(E5M2)
    x = torch.randn(50, 40, device=device)
    for few in (50, 49):
        monkeypatch.setattr(tensorwise.operands, "FEW_MAXIMA", few)
        maxima = tensorwise.scale.row_maxima(x)
        out, amax = fp8_operands(with_maxima(x, maxima), E5M2, columns=True, predicted=scale)
        assert len(reduced) == (few < len(maxima))
        assert amax.equal(maxima.amax(0, keepdim=True))
        for a, e in zip(
            out, tensorwise.quantize.quantize_tensor_reference(x, amax, E5M2, columns=True), strict=True
        ):
            assert a is e is None or not same(a, e)


@pytest.mark.parametrize("name", PRODUCERS)
def test_prediction_that_is_right_writes_once(name, monkeypatch):
    # the test counts writes of the reference, on a CPU
    producer = PRODUCERS[name](torch.device("cpu"))
    scale = PredictedScale(producer.fmt)
    producer.operands(scale)
    written = []
    codes = tensorwise.predicted.to_tensor_codes_reference
    monkeypatch.setattr(
        tensorwise.predicted,
        "to_tensor_codes_reference",
        lambda x, *rest: written.append(x) or codes(x, *rest),
    )
    producer.operands(scale)
    assert len(written) == 1
    scale.on(torch.device("cpu")).fill_(1e-3)
    producer.operands(scale)
    assert len(written) == 3


def test_prediction_is_not_copied():
    scale = PredictedScale(E4M3)
    scale.on(torch.device("cpu")).fill_(3)
    for other in (copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
        assert other.fmt == E4M3
        assert other.on(torch.device("cpu")) == 1


def test_prediction_is_fp32_whatever_the_default_dtype():
    with default_dtype(torch.bfloat16):
        scale = PredictedScale(E4M3).on(torch.device("cpu"))
    assert scale.dtype == torch.float32
