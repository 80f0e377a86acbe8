"""Rows in the order of their experts.

Nothing here synchronizes with the GPU: the number of rows of each expert is known there alone.
"""

from typing import NamedTuple

import torch

from coat_kernels.device import uses_kernels
from coat_kernels.experts.kernels import gather_rows_triton, order_triton, padded_triton, sum_to_tokens_triton
from coat_kernels.experts.reference import (
    gather_rows_reference,
    order_reference,
    padded_reference,
    sum_to_tokens_reference,
)


class PaddedRows(NamedTuple):
    """Where GEMMs that sum over the rows of each expert find them: each expert has a multiple of 16 places,
    at least 16, because not every GEMM writes an empty sum.

    row: the row of each place, int32 [p]; the number of rows for places without a row. token: the same for
    its token. offs: the end of each expert's places, int32 [e]. p is the largest number of places that the
    experts may need.
    """

    row: torch.Tensor
    token: torch.Tensor
    offs: torch.Tensor


class Rows(NamedTuple):
    """Rows in the order of their experts: one for each of the k experts of t tokens, n = t k.

    offs: the end of each expert's rows, int32 [e]. order: the choice of each row, where token i's choices are
    i k to i k + k - 1, int32 [n]. inverse: the row of each choice, int32 [t, k]. Both are None for rows that
    are tokens in this order, each with one expert.
    """

    offs: torch.Tensor
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None

    @property
    def k(self) -> int:
        return 1 if self.inverse is None else self.inverse.shape[1]

    def gather(self, codes: torch.Tensor) -> torch.Tensor:
        """FP8 codes of tokens [t, m], m a multiple of 16, as codes of rows [n, m]."""
        if self.order is None:
            return codes
        return (gather_rows_triton if uses_kernels(codes) else gather_rows_reference)(codes, self)

    def of_rows(self, weights: torch.Tensor) -> torch.Tensor:
        """The weights [t, k] in the order of rows, [n]."""
        return weights.flatten() if self.order is None else weights.flatten()[self.order]

    def experts(self, n: int) -> torch.Tensor:
        """The expert of each of the `n` rows, int64."""
        row = torch.arange(n, dtype=self.offs.dtype, device=self.offs.device)
        return torch.searchsorted(self.offs, row, right=True)

    def padded(self, n: int) -> PaddedRows:
        """The places of the `n` rows."""
        return PaddedRows(*(padded_triton if uses_kernels(self.offs) else padded_reference)(self, n))

    def to_tokens(
        self, rows: torch.Tensor, weights: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sum of `rows` [n, h] over each token's experts: [t, h]. bias: [e, h], added to each row times
        the weights [t, k], or None."""
        if self.order is None and bias is None:
            return rows
        sums = sum_to_tokens_triton if uses_kernels(rows) else sum_to_tokens_reference
        return sums(rows, self, weights, bias)


def sort_by_expert(chosen: torch.Tensor, count: int) -> Rows:
    """The rows of the experts `chosen` [t, k] of each token, out of `count`. An expert's rows are in the
    order of tokens."""
    return Rows(*(order_triton if uses_kernels(chosen) else order_reference)(chosen, count))
