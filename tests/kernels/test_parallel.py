"""Messages between tensor-parallel ranks: columns and scales arrive correctly."""

import pytest
import torch
import torch.distributed as dist

from coat_kernels import parallel, tensorwise
from coat_kernels.autograd.origin import with_maxima
from coat_kernels.fp8 import E4M3
from coat_kernels.tensorwise import operands, quantize, scale, transpose
from coat_kernels.tensorwise.quantize import quantize_tensor_reference
from coat_kernels.tensorwise.transpose import transpose_codes_reference
from tests.util import run_distributed

RANKS = 2
# tokens of a rank: columns are copied as whole words of 8 bytes, with a padded last word, or as bytes
TOKENS = (16, 24, 20, 5)


def codes_of(rank, m, n=48):
    return torch.randint(0, 255, (m, n), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


def part_of(rank):
    """A rank's part of a tensor; the largest magnitude of one part is 100 times that of the other."""
    return 100**rank * torch.randn(33, 48, generator=torch.Generator().manual_seed(rank))


def send():
    """Returns two dicts. By tokens of a rank: the joined columns of all ranks, and the dtype in which they
    were copied. By what is known of a tensor: this rank's operands with the scale of all ranks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    votes = [parallel.agreed(vote, dist.group.WORLD) for vote in (True, dist.get_rank() == 0, False)]
    assert votes == [True, False, False]
    return joined_columns(device), agreed_operands(device)


def agreed_operands(device):
    results = {}
    for known in ("nothing", "prediction", "maxima"):
        for kernels in (False, True):
            for module in (operands, scale, quantize, transpose):
                module.uses_kernels = lambda x, kernels=kernels: kernels
            x = part_of(dist.get_rank()).to(device)
            predicted = tensorwise.PredictedScale(E4M3) if known == "prediction" else None
            if known == "maxima":
                with_maxima(x, x.abs().amax(1))
            out, amax = operands.fp8_operands(x, E4M3, group=dist.group.WORLD, predicted=predicted)
            results[known, kernels] = out.rows.view(torch.uint8).cpu(), out.scale.cpu(), amax.cpu()
    return results


def joined_columns(device):
    results, copied = {}, []
    copy = torch.Tensor.copy_
    torch.Tensor.copy_ = lambda to, x, *rest: copied.append(to.dtype) or copy(to, x, *rest)
    for m in TOKENS:
        columns = transpose_codes_reference(codes_of(dist.get_rank(), m).to(device).view(torch.float8_e4m3fn))
        copied.clear()
        joined = parallel.gather_columns(columns, m, dist.group.WORLD)()
        results[m] = joined.dtype, joined.view(torch.uint8).cpu(), copied[0]
    torch.Tensor.copy_ = copy
    return results


def check_joined(ranks):
    """The columns are joined along the tokens."""
    for m in TOKENS:
        expected = torch.cat([codes_of(rank, m) for rank in range(RANKS)]).t()
        for results, _ in ranks:
            dtype, joined, word = results[m]
            assert dtype == torch.float8_e4m3fn and word == (torch.int64 if m % 8 == 0 else torch.uint8)
            assert joined.shape == (expected.shape[0], -(-RANKS * m // 16) * 16)
            assert joined[:, : RANKS * m].equal(expected) and not joined[:, RANKS * m :].any()


def check_agreed(ranks):
    """The ranks agree on the scale of the whole tensor, whatever is known of the parts, with kernels and
    without."""
    parts = [part_of(rank) for rank in range(RANKS)]
    amax = torch.cat(parts).abs().max().reshape(1)
    for (_, agreed), part in zip(ranks, parts, strict=True):
        for case, (rows, found_scale, found) in agreed.items():
            expected = quantize_tensor_reference(part, amax, E4M3)
            assert found.equal(amax) and found_scale.equal(expected.scale), case
            assert rows.equal(expected.rows.view(torch.uint8)), case


def check(ranks):
    check_joined(ranks)
    check_agreed(ranks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")
def test_what_ranks_gather():
    check(run_distributed(send, RANKS))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
def test_what_gpus_gather():
    check(run_distributed(send, RANKS, gpus=True))
