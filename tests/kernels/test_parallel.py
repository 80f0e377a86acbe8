"""What tensor-parallel ranks send each other arrives in its place."""

import pytest
import torch
import torch.distributed as dist

from tests.util import run_distributed

RANKS = 2
# tokens of a rank: columns come in whole words of 8 bytes, end in one that is padded, or come in bytes
TOKENS = (16, 24, 20, 5)


def codes_of(rank, m, n=48):
    return torch.randint(0, 255, (m, n), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


def joined_columns():
    """By tokens of a rank: its codes, the columns that are joined of all ranks, and how they were copied."""
    from coat_kernels import parallel
    from coat_kernels.tensorwise import transpose_codes_reference

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    results, copied = {}, []
    copy = torch.Tensor.copy_
    torch.Tensor.copy_ = lambda to, x, *rest: copied.append(to.dtype) or copy(to, x, *rest)
    for m in TOKENS:
        columns = transpose_codes_reference(codes_of(dist.get_rank(), m).to(device).view(torch.float8_e4m3fn))
        copied.clear()
        joined = parallel.gather_columns(columns, m, dist.group.WORLD)()
        results[m] = joined.dtype, joined.view(torch.uint8).cpu(), copied[0]
    torch.Tensor.copy_ = copy
    dist.destroy_process_group()
    return results


def check_joined(ranks):
    for m in TOKENS:
        expected = torch.cat([codes_of(rank, m) for rank in range(RANKS)]).t()
        for rank in ranks:
            dtype, joined, word = rank[m]
            assert dtype == torch.float8_e4m3fn and word == (torch.int64 if m % 8 == 0 else torch.uint8)
            assert joined.shape == (expected.shape[0], -(-RANKS * m // 16) * 16)
            assert joined[:, : RANKS * m].equal(expected) and not joined[:, RANKS * m :].any()


def test_columns_are_joined_along_the_tokens():
    check_joined(run_distributed(joined_columns, RANKS))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
def test_columns_are_joined_on_gpus():
    check_joined(run_distributed(joined_columns, RANKS, gpus=True))
