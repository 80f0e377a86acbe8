"""Several tensors in one launch get the codes, scales and magnitudes of separate launches."""

import pytest
import torch

from coat_kernels import tensorwise
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.tensorwise import PredictedScale, together
from coat_kernels.tensorwise.operands import fp8_operands
from coat_kernels.tensorwise.quantize import quantize_tensor_reference
from tests.interpreter import take_kernels
from tests.kernels.agreement import same
from tests.kernels.inputs import SHAPES, hard, wide

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles, including partial ones, and several tiles for each program of a second launch."""
    monkeypatch.setattr(together, "BLOCK", 64)
    monkeypatch.setattr(together, "COLUMNS_TILE", (32, 16))
    monkeypatch.setattr(together, "CORRECTING_PROGRAMS", 3)
    take_kernels(monkeypatch)


# of very different sizes, ending within tiles; and inputs that have broken quantizers
TENSORS = {
    "one": [(5, 33)],
    "three": [(1, 1), (37, 40), (3, 16)],
    "four": [*SHAPES[:3], (20, 8)],
    "broken": None,
}


def tensors(name: str, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    if TENSORS[name] is None:
        found = [torch.stack([*hard(40).values()]), torch.zeros(7, 40), torch.full((3, 5), torch.nan)]
    else:
        found = [wide(*shape, sigma=i) for i, shape in enumerate(TENSORS[name])]
    return [x.to(device, dtype) for x in found]


def check_same(actual, expected) -> None:
    """Compares codes, scales and magnitudes, where they exist."""
    for a, e in zip(actual, expected, strict=True):
        assert a is e is None or not same(a, e)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantize_together_is_as_if_alone(dtype, name, fmt, device):
    xs = tensors(name, dtype, device)
    predictions = [PredictedScale(fmt) for _ in xs]
    places = [prediction.on(xs[0].device) for prediction in predictions]
    alone = [fp8_operands(x, fmt, predicted=PredictedScale(fmt)) for x in xs]
    reference = [
        (quantize_tensor_reference(x, most, fmt), most) for x, (_, most) in zip(xs, alone, strict=True)
    ]
    # initial scales, right scales, and wrong scales for all tensors or for one
    for i, wrong in enumerate((None, None, 2.0**40, torch.nan)):
        if wrong is not None:
            for place in places[i % 2 :]:
                place.fill_(wrong)
        found = together.rows_together(xs, predictions, fmt)
        for one, by_itself, expected, place in zip(found, alone, reference, places, strict=True):
            for other in (by_itself, expected):
                check_same((*one[0], one[1]), (*other[0], other[1]))
            assert place.equal(one[0].scale)
            # cuBLASLt requires this alignment
            assert one[0].scale.data_ptr() % 16 == 0
    # always the same memory, as CUDA graphs require
    assert all(p.on(xs[0].device) is place for p, place in zip(predictions, places, strict=True))
    amax = [most for _, most in found]
    columns = together.columns_together(xs, amax, fmt)
    for one, x, most in zip(columns, xs, amax, strict=True):
        assert one.scale.data_ptr() % 16 == 0
        for quantize in (quantize_tensor_reference, tensorwise.quantize_tensor):
            check_same(one, quantize(x, most, fmt, rows=False, columns=True))


def test_quantize_together_leaves_rightly_predicted_codes_alone(device, monkeypatch):
    """The second launch rewrites the tensors whose scale was wrong, and no others."""
    xs = tensors("three", torch.bfloat16, device)
    predictions = [PredictedScale(E4M3) for _ in xs]
    together.rows_together(xs, predictions, E4M3)
    predictions[1].on(xs[0].device).fill_(2.0**40)
    launches = []
    kernel = together.rows_together_kernel

    class Between:
        def __getitem__(self, grid):
            def launch(*args, **constants):
                kernel[grid](*args, **constants)
                launches.append(constants["CORRECTS"])
                if not constants["CORRECTS"]:
                    for codes in args[together.SLOTS : together.SLOTS + len(xs)]:
                        codes.zero_()

            return launch

    monkeypatch.setattr(together, "rows_together_kernel", Between())
    found = together.rows_together(xs, predictions, E4M3)
    assert launches == [False, True]
    assert [bool(one.rows.view(torch.uint8).any()) for one, _ in found] == [False, True, False]
