"""Communication of a linear layer that is split over a tensor-parallel group: FP8 codes, partial sums,
amaxes.

Ranks agree on a scale only if their codes form one operand: the all-gathered codes of sequence parallelism.
Other GEMMs return sums over the ranks, and each rank has the scales of its own operands. Scales differ by
powers of two, so normal numbers are rounded as with the whole tensor's scale.

Every function takes the process group, and all of its ranks must call it in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from coat_kernels.fp8 import ALIGNMENT

# codes are copied in words of this type if their number allows
WORD = torch.int64


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """How one linear layer is split over `group` (Shoeybi et al., arXiv 1909.08053, section 3).

    by_output: each rank holds some rows of the weight and computes some columns of the output (column
        parallel); otherwise it holds some columns of the weight, and reads some columns of the input (row
        parallel).
    sequence: outside the layer activations are split by tokens (Korthikanti et al., arXiv 2205.05198, section
        4.2.2): a by_output layer gathers its input, the other kind scatters its output.
    reduce_grad: a by_output layer without `sequence` sums the gradient of its input over the ranks.
    """

    group: dist.ProcessGroup
    by_output: bool
    sequence: bool = False
    reduce_grad: bool = True

    @property
    def gathers_input(self) -> bool:
        return self.by_output and self.sequence

    @property
    def scatters_output(self) -> bool:
        return self.sequence and not self.by_output


def all_reduce_amax(amax: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The amax over all ranks, from the amax of each rank, FP32 [1], in place."""
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def agreed(vote: bool, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of `group` call this with True. Synchronizes the CPU with the GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    votes = torch.tensor([int(vote)], dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())


def _after(work: dist.Work, result: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns a function that waits for `work` and returns its `result`."""

    def wait() -> torch.Tensor:
        work.wait()
        return result

    return wait


def gather_rows(codes: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Starts the all-gather of `codes` [m, n]. The returned function waits for the result [ranks * m, n]."""
    m, n = codes.shape
    gathered = torch.empty(group.size() * m, n, dtype=codes.dtype, device=codes.device)
    # as bytes, because not every backend supports FP8
    pair = gathered.view(torch.uint8), codes.contiguous().view(torch.uint8)
    return _after(dist.all_gather_into_tensor(*pair, group=group, async_op=True), gathered)


def gather_columns(codes: torch.Tensor, m: int, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Starts the all-gather of column-major codes [n, m padded]. The returned function waits for them and
    joins them along the tokens: [n, ranks * m padded]."""
    n, wait_for_rows = codes.shape[0], gather_rows(codes, group)
    ranks, length = group.size(), m * codes.element_size()

    def wait() -> torch.Tensor:
        total = ranks * m
        joined = torch.empty(n, total + -total % ALIGNMENT, dtype=codes.dtype, device=codes.device)
        # copying single bytes takes six times as long
        word = torch.uint8 if length % WORD.itemsize else WORD
        words = length // word.itemsize
        parts = wait_for_rows().view(word).view(ranks, n, -1)[:, :, :words]
        joined.view(word)[:, : ranks * words].view(n, ranks, words).copy_(parts.transpose(0, 1))
        if total % ALIGNMENT:
            joined[:, total:] = 0
        return joined

    return wait


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Starts the reduce-scatter of `x` [ranks * m, n]. The returned function waits for this rank's [m, n]."""
    part = torch.empty(x.shape[0] // group.size(), x.shape[1], dtype=x.dtype, device=x.device)
    return _after(dist.reduce_scatter_tensor(part, x, group=group, async_op=True), part)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Starts the all-reduce of `x`, in place. The returned function waits for it."""
    return _after(dist.all_reduce(x, group=group, async_op=True), x)
