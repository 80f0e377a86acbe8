"""What a file of the compressed layout may say of a moment: nothing but what `StoredMoment` writes."""

import io

import pytest
import torch

from coat_ds import CoatAdamW
from coat_ds.optim.moment import Moment
from coat_ds.optim.options import MOMENTS
from coat_ds.optim.saving import decoding_on_save
from coat_ds.optim.stored_moment import StoredMoment, _rebuild
from coat_kernels.codecs import get_codec
from tests.coat_ds.optimizers import encoded

CODES, SCALE, EXPONENT = torch.zeros(300, dtype=torch.uint8), torch.ones(3), torch.ones(3, dtype=torch.uint8)
PIECE = (0, "fp8_expanded", CODES, SCALE, EXPONENT)


class Written:
    """Pickled as a call of `_rebuild` with any arguments."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return _rebuild, self.arguments


def read(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_stored_moment_comes_back_by_a_reader_of_data_only():
    layout = ((0, get_codec("fp32")), (100, get_codec("fp8_expanded")), (1000, get_codec("log8")))
    moment = encoded(torch.rand(40, 50), layout)
    found = read(StoredMoment(moment.pieces, moment.shape))
    assert isinstance(found, Moment) and (found.layout, found.shape) == (moment.layout, moment.shape)
    assert all(torch.equal(a, b) for a, b in zip(found.stored(), moment.stored(), strict=True))


def test_stored_moment_of_a_part_is_its_values():
    moment = encoded(torch.rand(40, 50), get_codec("log8"))
    part = StoredMoment(moment.pieces, moment.shape)[3:5]
    assert read(part).equal(moment.decode()[3:5])


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_stored_moment_is_continued_by_adamw_as_fp32(how):
    """Also where second moments are zero, to which no first moment can be relative."""
    options, ends = {"lr": 1e-2, "betas": (0.9, 0.95)}, []
    for layout in ("stock", "compressed"):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.rand(64, 128))
        ours = CoatAdamW([p], checkpoint_layout=layout, **options)
        p.grad = torch.rand(64, 128)
        p.grad[::2] = 0
        ours.step()
        stock = torch.optim.AdamW([p], **options, **how)
        stock.load_state_dict(read(ours.state_dict()))
        assert all(type(x) is torch.Tensor for x in stock.state[p].values())
        for _ in range(3):
            p.grad = torch.rand(64, 128)
            stock.step()
        ends.append(p.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize("exp_avg_sq_format", ["log8", "fp8_expanded"])
def test_stored_moment_is_written_in_the_layout_asked_for(exp_avg_sq_format):
    p = torch.nn.Parameter(torch.rand(64, 128))
    p.grad = torch.rand(64, 128)
    compressed, stock = (
        CoatAdamW([p], exp_avg_sq_format=exp_avg_sq_format, checkpoint_layout=layout)
        for layout in ("compressed", "stock")
    )
    compressed.step()
    stock.load_state_dict(compressed.state_dict())
    with decoding_on_save():
        state = read(stock.state_dict())["state"][0]
    assert all(type(state[name]) is torch.Tensor for name in MOMENTS)


def test_stored_moment_gives_kernels_no_memory():
    # a moment has none: FusedAdam, loading such a file, read from a null pointer
    moment = encoded(torch.rand(40, 50), get_codec("log8"))
    stored = read(StoredMoment(moment.pieces, moment.shape))
    for found in (moment, moment.view(-1)[128:]):
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            found.data_ptr()
    with pytest.raises(TypeError, match="have no memory of their own"):
        stored.data_ptr()


def piece(index: int, value) -> list:
    return [(*PIECE[:index], value, *PIECE[index + 1 :])]


def relative_piece() -> tuple:
    """What is written of a first moment with the second one that it is relative to."""
    p = torch.nn.Parameter(torch.ones(2, 128))
    p.grad = torch.ones(2, 128)
    optimizer = CoatAdamW([p], min_numel=0, checkpoint_layout="compressed")
    optimizer.step()
    _, ((piece,), *_) = optimizer.state_dict()["state"][0]["exp_avg"].__reduce_ex__(2)
    assert (len(piece), piece[1], piece[5]) == (9, "ratio8", "log8")
    return piece


RELATIVE = relative_piece()
# of one group of two
SMALLER = ("log8", RELATIVE[6][:128], *(t[:1] for t in RELATIVE[7:]))
BAD = {
    "no pieces": ([], 128, (300,)),
    "pieces that are no list": (PIECE, 128, (300,)),
    "a piece that is too short": ([PIECE[:4]], 128, (300,)),
    "a piece that is a string": (["abcde"], 128, (300,)),
    "another group size": ([PIECE], 64, (300,)),
    "a group size that is no number": ([PIECE], "128", (300,)),
    "a group size that is true": ([PIECE], True, (300,)),
    "another shape": ([PIECE], 128, (301,)),
    "a negative shape": ([PIECE], 128, (-300, -1)),
    "a shape of floats": ([PIECE], 128, (300.0,)),
    "a shape that is a list": ([PIECE], 128, [300]),
    "a first piece that does not begin at 0": (piece(0, 1), 128, (300,)),
    "a begin that is a tensor": (piece(0, torch.tensor(0)), 128, (300,)),
    "two pieces that overlap": ([PIECE, PIECE], 128, (600,)),
    "an unknown codec": (piece(1, "fp7"), 128, (300,)),
    "a codec that is a list": (piece(1, ["fp32"]), 128, (300,)),
    "a codec of other codes": (piece(1, "fp32"), 128, (300,)),
    "codes that are no tensor": (piece(2, "codes"), 128, (300,)),
    "codes that are a parameter": (piece(2, torch.nn.Parameter(torch.zeros(300))), 128, (300,)),
    "codes of another type": (piece(2, CODES.float()), 128, (300,)),
    "codes of two dimensions": (piece(2, CODES.view(3, 100)), 128, (300,)),
    "codes of stride 0": (piece(2, CODES[:1].expand(2**40)), 128, (2**40,)),
    "300 codes of stride 0": (piece(2, CODES[:1].expand(300)), 128, (300,)),
    "codes that are sparse": (piece(2, CODES.to_sparse()), 128, (300,)),
    "codes without values": (piece(2, CODES.to("meta")), 128, (300,)),
    "too few scales": (piece(3, SCALE[:2]), 128, (300,)),
    "no scales": (piece(3, SCALE[:0]), 128, (300,)),
    "scales of another type": (piece(3, SCALE.double()), 128, (300,)),
    "too many exponents": (piece(4, CODES), 128, (300,)),
    "exponents of another type": (piece(4, SCALE), 128, (300,)),
    "nothing with values": ([(*PIECE[:2], *(t.to("meta") for t in PIECE[2:]))], 128, (300,)),
    "a second moment of nothing": ([PIECE + PIECE[1:]], 128, (300,)),
    "no second moment": ([RELATIVE[:5]], 128, (256,)),
    "a smaller second moment": ([RELATIVE[:5] + SMALLER], 128, (256,)),
    "a second moment that none is relative to": (
        [RELATIVE[:5] + ("fp8_expanded", CODES[:256], SCALE[:2], EXPONENT[:2])],
        128,
        (256,),
    ),
}


@pytest.mark.parametrize("pieces, group_size, shape", BAD.values(), ids=BAD)
def test_stored_moment_refuses_what_none_was_written_as(pieces, group_size, shape):
    with pytest.raises(ValueError, match=r"stored moment: expected .*, found ") as refused:
        read(Written(pieces, group_size, shape))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
