"""Quantizing and dequantizing groups in plain PyTorch, in any format of `GROUP_FORMATS`."""

from typing import NamedTuple

import torch

from coat_kernels.autograd import observers
from coat_kernels.groups import e4m3, sqrt8
from coat_kernels.groups.format import GroupFormat
from coat_kernels.prepared import cdiv

GROUP_FORMATS: dict[str, GroupFormat] = {f.name: f for f in (sqrt8.FORMAT, e4m3.FORMAT)}
DEFAULT_FORMAT = sqrt8.FORMAT.name
# consecutive elements of a row that share one scale in a saved activation
GROUP_SIZE = 16


class Grouped(NamedTuple):
    """`codes` uint8 [rows, columns] and `exponent` uint8 [rows, ceil(columns / G)] in `format`."""

    codes: torch.Tensor
    exponent: torch.Tensor
    format: GroupFormat

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and the exponents, for autograd to save."""
        if (observer := observers.current()) is not None:
            observer.saves(self)
        return self.codes, self.exponent


def _split(x: torch.Tensor, group_size: int) -> torch.Tensor:
    padding = -x.shape[1] % group_size
    return torch.nn.functional.pad(x, (0, padding)).unflatten(1, (-1, group_size))


def quantize_groups_reference(x: torch.Tensor, group_size: int, fmt: str = DEFAULT_FORMAT) -> Grouped:
    """`x` [rows, columns] in groups of `group_size` along its columns, in the format called `fmt`."""
    codes, exponent = GROUP_FORMATS[fmt].to_codes(_split(x.float(), group_size))
    return Grouped(codes.flatten(1)[:, : x.shape[1]].contiguous(), exponent, GROUP_FORMATS[fmt])


def dequantize_groups_reference(q: Grouped, group_size: int) -> torch.Tensor:
    """FP32 [rows, columns]."""
    scale = torch.exp2(q.exponent.float() - 127)
    groups = _split(q.format.from_codes(q.codes), group_size) * scale[..., None]
    return groups.flatten(1)[:, : q.codes.shape[1]]


def empty_grouped(
    rows: int, columns: int, group_size: int, fmt: str, device: torch.device, parts: int = 1
) -> Grouped:
    """Uninitialised storage for [rows, parts * columns]; each part has its own groups."""
    return Grouped(
        torch.empty(rows, parts * columns, dtype=torch.uint8, device=device),
        torch.empty(rows, parts * cdiv(columns, group_size), dtype=torch.uint8, device=device),
        GROUP_FORMATS[fmt],
    )
