"""What a linear layer that is split over a tensor-parallel group sends: FP8 codes, partial sums, magnitudes.

Every function takes the process group and is called by all of its ranks in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from coat_kernels.tensorwise import ALIGNMENT


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """How one linear layer is split over `group` (Shoeybi et al., arXiv 1909.08053, section 3).

    by_output: each rank holds some rows of the weight and gives some columns of the output (column parallel);
        otherwise some columns of the weight, and takes some columns of the input (row parallel).
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

    @property
    def splits_input(self) -> bool:
        """Whether ranks hold different parts of the input."""
        return self.sequence or not self.by_output

    @property
    def splits_output(self) -> bool:
        """Whether ranks hold different parts of the output."""
        return self.sequence or self.by_output


def largest_of_all(largest: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The largest of the ranks' magnitudes, FP32 [1], in place."""
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def gather_rows(codes: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Starts gathering FP8 `codes` [m, n] of all ranks; the result waits for them: [ranks * m, n]."""
    m, n = codes.shape
    gathered = torch.empty(group.size() * m, n, dtype=torch.uint8, device=codes.device)
    work = dist.all_gather_into_tensor(gathered, codes.view(torch.uint8), group=group, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return gathered.view(codes.dtype)

    return wait


def gather_columns(codes: torch.Tensor, m: int, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Starts gathering FP8 columns [n, m padded] of all ranks; the result waits for them and joins them along
    the tokens: [n, ranks * m padded].
    """
    n, wait_for_rows = codes.shape[0], gather_rows(codes, group)

    def wait() -> torch.Tensor:
        parts = wait_for_rows().view(torch.uint8).view(group.size(), n, -1)[:, :, :m]
        total = group.size() * m
        joined = torch.nn.functional.pad(parts.transpose(0, 1).reshape(n, total), (0, -total % ALIGNMENT))
        return joined.view(codes.dtype)

    return wait


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Starts summing `x` [ranks * m, n] over the ranks; the result waits for this rank's part, [m, n]."""
    part = torch.empty(x.shape[0] // group.size(), x.shape[1], dtype=x.dtype, device=x.device)
    work = dist.reduce_scatter_tensor(part, x, group=group, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return part

    return wait


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Starts summing `x` over the ranks, in place; the result waits for it."""
    work = dist.all_reduce(x, group=group, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return x

    return wait
