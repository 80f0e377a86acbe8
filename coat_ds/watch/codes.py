"""FP8 codes of linear layers and codes of saved activations, counted in a step that is watched.

- flushed: the share of zero codes. An exact zero counts too: by then there are only codes.
- saturated: the share of codes of the format's largest magnitude, or of NaN and infinity. A scale follows its
  tensor's largest magnitude, so that a few such codes are usual and many are not.

At most `SAMPLE` codes of a tensor are counted, evenly spread over rows and columns. They are copied when
the observer is called, and counted later, many tensors at once. The observer sees only layers that run in
Python. Layers that run as CUDA graphs take turns: one in `TURNS` runs in Python in a watched step.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from coat_ds.layers.modules.converted_forward import attributes_of
from coat_ds.layers.modules.linear import Gemm
from coat_kernels.experts import ExpertsState
from coat_kernels.graphs import Graphs
from coat_kernels.groups import Grouped, GroupFormat
from coat_kernels.tensorwise import PredictedScale

SAMPLE = 2**18
# the rows of codes of no known layer, and of what layers save for backward
OTHER, SAVED = "other", "saved activations"
# of each row and role: codes, zeros, and the largest ones
ROLES = ("input", "gradient", "saved")
SUMS = 3 * len(ROLES)
# number of samples of one kind that are counted together
WAITING = 32
# number of readings in which all replayed layers are counted once: running one in Python takes as long as
# several replays
TURNS = 8


class CodeCounter:
    """A `coat_kernels.autograd.observers.Observer` that counts codes by layer, in training. A layer is known
    by the scales of its operands."""

    def __init__(self, model: nn.Module):
        self.model = model
        # by what is counted together: scale and role of each sample, and its codes as bytes
        self._waiting: dict[tuple, list[tuple[object, str, torch.Tensor]]] = defaultdict(list)
        self._counted: list[tuple[object, str]] = []
        self._counts: list[torch.Tensor] = []

    def codes(self, role: str, prediction: object, codes: torch.Tensor) -> None:
        """As in `Observer`."""
        self._take(role, prediction, codes.dtype, codes)

    def saves(self, q: Grouped) -> None:
        """As in `Observer`."""
        self._take("saved", None, q.format, q.codes)

    @torch.no_grad()
    def _take(self, role: str, scale: object, fmt: torch.dtype | GroupFormat, codes: torch.Tensor) -> None:
        if not self.model.training:
            return
        found = sampled(codes)
        alike = fmt, len(found), found.device
        self._waiting[alike].append((scale, role, found))
        if len(self._waiting[alike]) == WAITING:
            self._count(alike)

    def _count(self, alike: tuple) -> None:
        """Counts the samples of one kind that wait."""
        scales, roles, codes = zip(*self._waiting.pop(alike), strict=True)
        fmt, size, _ = alike
        magnitudes = _magnitudes(torch.stack(codes), fmt)
        zeros, largest = (magnitudes == 0).sum(-1), (~(magnitudes < _largest(fmt))).sum(-1)
        self._counts.append(torch.stack([torch.full_like(zeros, size), zeros, largest], 1))
        self._counted += zip(scales, roles, strict=True)

    @torch.no_grad()
    def sums(self, rows: Sequence[str], device: torch.device) -> torch.Tensor:
        """The counts, FP64 [rows, SUMS]. rows: names of `layer_names`, perhaps of other ranks, too."""
        for alike in list(self._waiting):
            self._count(alike)
        sums = torch.zeros(len(rows) * len(ROLES), 3, dtype=torch.float64, device=device)
        if self._counts:
            names, index = dict(_scales_of(self.model)), {name: i for i, name in enumerate(rows)}
            places = []
            for scale, role in self._counted:
                row = index[SAVED if role == "saved" else names.get(scale, OTHER)]
                places.append(row * len(ROLES) + ROLES.index(role))
            found = torch.cat([counts.to(device) for counts in self._counts]).double()
            sums.index_add_(0, sent(places, torch.int64, device), found)
        return sums.view(-1, SUMS)


def sent(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A vector on `device`. The CPU does not wait for what runs there."""
    here = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def sampled(codes: torch.Tensor) -> torch.Tensor:
    """A copy of at most `SAMPLE` of the codes [rows, columns], as bytes. The stride has no divisor in common
    with the number of columns, so that all columns get their turn."""
    stride = max(1, -(-codes.numel() // SAMPLE))
    while math.gcd(stride, codes.shape[1]) > 1:
        stride += 1
    return codes.contiguous().view(torch.uint8).view(-1)[::stride].clone()


@functools.cache
def _largest(fmt: torch.dtype | GroupFormat) -> float:
    """The largest finite magnitude of the format's codes."""
    sizes = _magnitudes(torch.arange(256, dtype=torch.uint8), fmt)
    return sizes[sizes.isfinite()].max().item()


def _magnitudes(codes: torch.Tensor, fmt: torch.dtype | GroupFormat) -> torch.Tensor:
    """The magnitudes of the codes, without scales, FP32."""
    return (fmt.from_codes(codes) if isinstance(fmt, GroupFormat) else codes.view(fmt).float()).abs()


def layer_names(model: nn.Module) -> list[str]:
    """The rows of `CodeCounter.sums`."""
    return list(dict.fromkeys([*(name for _, name in _scales_of(model)), OTHER, SAVED]))


def _scales_of(model: nn.Module) -> Iterator[tuple[PredictedScale, str]]:
    """The scales that each module, or what replaces its forward, holds, and the name of the operand's layer.
    That of a joint GEMM is the name of what holds its scales. Projections of grouped experts are called
    `gate_up` and `down`."""
    for name, module in model.named_modules():
        for attribute, value in attributes_of(module):
            if isinstance(value, PredictedScale):
                yield value, name
            elif isinstance(value, Gemm):
                # a module without a weight of its own holds a joint GEMM
                path = name if hasattr(module, "weight") else f"{name}.{attribute}"
                yield from ((scale, path) for scale in (value.x_scale, value.grad_scale))
            elif isinstance(value, ExpertsState):
                yield from ((value.x_scale, f"{name}.gate_up"), (value.a_scale, f"{name}.down"))


def graphs_of(model: nn.Module) -> list[Graphs]:
    """The objects that record CUDA graphs, in the order of the modules that hold them."""
    return [
        value for module in model.modules() for _, value in attributes_of(module) if isinstance(value, Graphs)
    ]


def in_turn(graphs: Sequence[Graphs], turn: int) -> list[Graphs]:
    """Of layers that are replayed, every `TURNS`th, another one in each reading. They run in Python in this
    reading."""
    replayed = [found for found in graphs if found.count]
    period = min(TURNS, len(replayed))
    return replayed[turn % period :: period] if replayed else []


def figures(sums: Sequence[float]) -> dict[str, float]:
    """The figures in the SUMS numbers of a layer, or of several; without those that nothing was counted
    for."""
    found = {}
    for i, role in enumerate(ROLES):
        codes, zeros, largest = sums[3 * i : 3 * i + 3]
        if codes > 0:
            found[f"{role}_flushed"] = zeros / codes
            found[f"{role}_saturated"] = largest / codes
    return found
