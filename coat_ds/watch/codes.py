"""FP8 codes of linear layers and codes of saved activations, counted in a step that is watched.

- flushed: the share of zero codes. An exact zero counts too: by then there are only codes.
- saturated: the share of codes of the format's largest magnitude, or of NaN and infinity. A scale follows its
  tensor's largest magnitude, so that a few such codes are usual and many are not.
- wrong scales: the share of operands whose predicted scale was wrong, so that they were written twice

Of a tensor about `SAMPLE` codes are looked at, in rows that are evenly spread. The observer sees only what
Python runs. Layers that are replayed as CUDA graphs run in Python in the first forward that is watched, whose
saved tensors are hooked, and in its backward; what they replay in other micro-batches is not counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from coat_ds.layers.replaced import replaced
from coat_ds.saved_bytes import SavedStorages
from coat_kernels.tensorwise import PredictedScale

SAMPLE = 2**20
# the row of what no layer is known for
OTHER = "other"
# of each layer: codes, zeros and the largest, of inputs, of gradients and of saved activations; predictions
# and wrong ones
ROLES = {"input": 0, "gradient": 3, "saved": 6}
PREDICTIONS = 9
SUMS = 11
# magnitude bits of the largest finite code
LARGEST = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}


class CodeCounter:
    """Counts what `coat_kernels.watching` tells, by layer. Sums lie on the device of the codes.

    A layer is known by its scales: those of linear layers and of other producers. Blocks are layers, too.

    names: of the rows of the sums, where other ranks hold other layers; by default `layer_names(model)`.
    """

    def __init__(self, model: nn.Module, names: Sequence[str] | None = None):
        scales = dict(_scales_of(model))
        self.blocks = dict(_blocks_of(model))
        self._names = {id(scale): name for scale, name in scales.items()}
        # kept, so that no other object gets their ids
        self._scales = scales
        if names is None:
            names = _rows(scales.values(), self.blocks)
        self.index = {name: i for i, name in enumerate(names)}
        self.sums: torch.Tensor | None = None

    def _add(self, name: str, at: int, numbers: Sequence[torch.Tensor | int], device: torch.device) -> None:
        if self.sums is None:
            self.sums = torch.zeros(len(self.index), SUMS, dtype=torch.float64, device=device)
        row = self.sums[self.index[name]]
        for i, number in enumerate(numbers):
            row[at + i] += number

    @torch.no_grad()
    def codes(self, role: str, prediction: Any, codes: torch.Tensor) -> None:
        """As `coat_kernels.watching.Observer`."""
        name = self._names.get(id(prediction), OTHER)
        magnitude = sampled(codes).view(torch.uint8) & 0x7F
        largest = magnitude >= LARGEST[codes.dtype]
        numbers = magnitude.numel(), (magnitude == 0).sum(), largest.sum()
        self._add(name, ROLES[role], numbers, codes.device)

    @torch.no_grad()
    def predicted(self, prediction: Any, used: torch.Tensor, true: torch.Tensor) -> None:
        """As `coat_kernels.watching.Observer`."""
        name = self._names.get(id(prediction), OTHER)
        self._add(name, PREDICTIONS, (1, (used != true).sum()), used.device)

    @torch.no_grad()
    def saved(self, block: str, codes: torch.Tensor, exponent: torch.Tensor) -> None:
        """Counts codes [rows, columns] that are saved in groups; zeros in a group of zeros do not count."""
        stride = max(1, codes.numel() // SAMPLE)
        codes, exponent = codes[::stride], exponent[::stride]
        group = -(-codes.shape[1] // exponent.shape[1])
        holds = (exponent > 1).repeat_interleave(group, 1)[:, : codes.shape[1]]
        if codes.dtype == torch.int8:
            zero, largest = codes == 0, (codes == -128) | (codes.abs() == 127)
        else:
            magnitude = codes.view(torch.uint8) & 0x7F
            zero, largest = magnitude == 0, magnitude >= LARGEST[codes.dtype]
        numbers = holds.sum(), (zero & holds).sum(), (largest & holds).sum()
        self._add(block, ROLES["saved"], numbers, codes.device)


class SavedCodes(SavedStorages):
    """Storages that autograd saves, and the codes in groups among them. `block`: whose forward runs."""

    def __init__(self, counter: CodeCounter, is_left_out):
        super().__init__(is_left_out)
        self.counter, self.block, self._codes = counter, OTHER, None

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        codes, self._codes = self._codes, None
        if x.dim() == 2 and x.dtype in (torch.int8, torch.float8_e4m3fn):
            self._codes = x.detach()
        elif codes is not None and x.dtype == torch.uint8 and x.dim() == 2 and len(x) == len(codes):
            # a group's exponent is saved behind its codes
            self.counter.saved(self.block, codes, x.detach())
        return super()._pack(x)


def layer_names(model: nn.Module) -> list[str]:
    """The layers of `model` that are counted one by one, and "other" for all others."""
    return _rows((name for _, name in _scales_of(model)), (name for name, _ in _blocks_of(model)))


def _rows(layers: Iterable[str], blocks: Iterable[str]) -> list[str]:
    return list(dict.fromkeys((*layers, *blocks, OTHER)))


def sampled(codes: torch.Tensor) -> torch.Tensor:
    """Rows, at least one, that hold `SAMPLE` codes or somewhat more."""
    stride = min(max(1, codes.numel() // SAMPLE), max(1, codes.shape[0]))
    return codes[::stride]


def _scales_of(model: nn.Module) -> Iterator[tuple[PredictedScale, str]]:
    """The scales that each module, or what stands in for its forward, holds, and the name of the operand's
    layer."""
    for name, module in model.named_modules():
        for holder in (module, replaced(module)):
            for attribute, value in () if holder is None else vars(holder).items():
                if isinstance(value, PredictedScale):
                    yield value, name
                    continue
                for found, path in _inside(value, attribute):
                    yield found, f"{name}.{path}"


def _inside(value: Any, path: str) -> Iterator[tuple[PredictedScale, str]]:
    """Scales in what a module holds: the options of its products, in dicts and lists of them."""
    if isinstance(value, dict):
        if not any(isinstance(v, PredictedScale) for v in value.values()):
            return
        for found in value.values():
            if isinstance(found, PredictedScale):
                yield found, path
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _inside(item, f"{path}.{i}")
    elif type(value).__name__ == "MergedLinear":
        yield value.x_scale, path
        yield value.grad_scale, path


def _blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The members of lists of modules, as a model's layers are, but for lists within them."""
    modules = list(model.named_modules())
    names = {module: name for name, module in modules}
    taken: list[str] = []
    for name, module in modules:
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{t}.") for t in taken):
            taken.append(name)
            for block in module:
                yield names[block], block


class Blocks:
    """Hooks by which `saved` knows whose forward runs, until `close`."""

    def __init__(self, saved: SavedCodes):
        self._hooks = []
        for name, block in saved.counter.blocks.items():
            self._hooks.append(block.register_forward_pre_hook(partial(_enter, saved, name)))
            self._hooks.append(block.register_forward_hook(partial(_leave, saved), always_call=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _enter(saved: SavedCodes, name: str, *_) -> None:
    saved.block = name


def _leave(saved: SavedCodes, *_) -> None:
    saved.block = OTHER


def figures(sums: Sequence[float]) -> dict[str, float]:
    """What the SUMS numbers of a layer, or of several, say; without what they say nothing of."""
    found = {}
    for role, at in ROLES.items():
        codes, zeros, largest = sums[at : at + 3]
        if codes > 0:
            found[f"{role}_flushed"], found[f"{role}_saturated"] = zeros / codes, largest / codes
    predictions, wrong = sums[PREDICTIONS:]
    if predictions > 0:
        found["wrong_scales"] = wrong / predictions
    return found
