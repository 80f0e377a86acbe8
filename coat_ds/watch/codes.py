"""FP8 codes of linear layers and codes of saved activations, counted in a step that is watched.

- flushed: the share of zero codes. An exact zero counts too: by then there are only codes.
- saturated: the share of codes of the format's largest magnitude, or of NaN and infinity. A scale follows its
  tensor's largest magnitude, so that a few such codes are usual and many are not.
- wrong scales: the share of operands whose predicted scale was wrong, so that they were written twice

At most `SAMPLE` codes of a tensor are counted, evenly spread over rows and columns. They are copied when
the observer is called, and counted later, many tensors at once. The observer sees only layers that run in
Python. Layers that run as CUDA graphs take turns: one in `TURNS` runs in Python in the first watched forward,
with hooks on its saved tensors, and in its backward. The others are replayed, and keep their last counts.
Each chunk of a pipeline has a first forward of its own.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from coat_ds.layers.modules.replaced import attributes_of
from coat_ds.saved_bytes import SavedStorages
from coat_ds.watch.sent import sent
from coat_kernels.graphs import Graphs
from coat_kernels.groups import Grouped, GroupFormat
from coat_kernels.tensorwise import PredictedScale

SAMPLE = 2**18
# the row of what no layer is known for
OTHER = "other"
# of each layer: codes, those that are not zero and the largest, of inputs, of gradients and of saved
# activations; predictions and wrong ones; ranks on which it was replayed
ROLES = {"input": 0, "gradient": 3, "saved": 6}
PREDICTIONS = 9
REPLAYED = 11
SUMS = 12
# samples that wait to be counted
WAITING = 32
# readings until each layer that is replayed had its turn: to run one in Python takes as long as some replays
TURNS = 8


class _Sample(NamedTuple):
    """Codes of one tensor, as bytes [n]."""

    row: int
    role: str
    format: torch.dtype | GroupFormat
    codes: torch.Tensor
    exponent: torch.Tensor | None
    """Exponent of the group of each code, uint8 [n]; None where no group can consist of zeros only."""

    @property
    def alike(self) -> tuple:
        """Equal for samples that are counted together."""
        return self.format, len(self.codes), self.exponent is None, self.codes.device


class CodeCounter:
    """Counts what `coat_kernels.autograd.watching` tells, by layer. Sums lie on the device of the codes.

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
        self._samples: list[_Sample] = []
        # by the number of a sum: what is known without the device, and what is not
        self._known: dict[int, int] = defaultdict(int)
        self._places: list[int] = []
        self._counts: list[torch.Tensor] = []
        self._wrong: list[tuple[int, torch.Tensor]] = []
        # by shape: the group that each code of a sample is in
        self._groups: dict[tuple, torch.Tensor] = {}
        # by address of the codes: the format of what autograd is about to save
        self.formats: dict[int, GroupFormat] = {}

    def sums(self, device: torch.device) -> torch.Tensor:
        """What was counted, FP64 [layers, SUMS]."""
        self._count()
        known = [self._known.get(i, 0) for i in range(len(self.index) * SUMS)]
        sums = sent(known, torch.float64, device)
        for places, counts in (
            (self._places, self._counts),
            ([place for place, _ in self._wrong], [wrong for _, wrong in self._wrong]),
        ):
            if counts:
                found = torch.cat([count.to(device) for count in counts]).double()
                sums.index_add_(0, sent(places, torch.int64, device), found)
        return sums.view(-1, SUMS)

    def _count(self) -> None:
        """Counts the samples that wait."""
        alike: dict[tuple, list[_Sample]] = defaultdict(list)
        for sample in self._samples:
            alike[sample.alike].append(sample)
        for samples in alike.values():
            one = samples[0]
            reached = _reached(torch.stack([s.codes for s in samples]), one.format)
            if one.exponent is not None:
                # a group of zeros has the smallest exponent
                holds = torch.stack([s.exponent for s in samples if s.exponent is not None]) > 1
                reached = torch.cat([holds[None], reached & holds])
            # of [kinds, samples, codes]
            self._counts.append(reached.sum(-1).view(-1))
            for kind in range(3 - len(reached), 3):
                self._places += [s.row * SUMS + ROLES[s.role] + kind for s in samples]
        self._samples = []

    def _take(self, sample: _Sample) -> None:
        self._samples.append(sample)
        if len(self._samples) == WAITING:
            self._count()

    def leave_out(self, blocks: set[str]) -> None:
        """Excludes the layers in these blocks, which run as CUDA graphs: no observer sees their codes."""
        for name, row in self.index.items():
            self._known[row * SUMS + REPLAYED] = int(not blocks.isdisjoint(_enclosing(name)))

    def _row(self, prediction: Any) -> int:
        return self.index[self._names.get(id(prediction), OTHER)]

    @torch.no_grad()
    def codes(self, role: str, prediction: Any, codes: torch.Tensor) -> None:
        """As `coat_kernels.autograd.watching.Observer`."""
        row, found = self._row(prediction), sampled(codes)
        self._known[row * SUMS + ROLES[role]] += len(found)
        self._take(_Sample(row, role, codes.dtype, found, None))

    @torch.no_grad()
    def predicted(self, prediction: Any, used: torch.Tensor, true: torch.Tensor) -> None:
        """As `coat_kernels.autograd.watching.Observer`."""
        place = self._row(prediction) * SUMS + PREDICTIONS
        self._known[place] += 1
        self._wrong.append((place + 1, used != true))

    @torch.no_grad()
    def saves(self, q: Grouped) -> None:
        """As `coat_kernels.autograd.watching.Observer`."""
        self.formats[q.codes.data_ptr()] = q.format

    @torch.no_grad()
    def saved(self, block: str, q: Grouped) -> None:
        """Takes codes [rows, columns] that are saved in groups; zeros in a group of zeros do not count."""
        codes, exponent, fmt = q
        found = sampled(codes)
        key = codes.shape, exponent.shape, codes.device
        if key not in self._groups:
            stride, columns, groups = _stride(codes), codes.shape[1], exponent.shape[1]
            at = torch.arange(len(found), device=codes.device) * stride
            # a power of two; the last group may be a short one
            size = 2 ** math.ceil(math.log2(max(columns / groups, 1)))
            self._groups[key] = at // columns * groups + at % columns // size
        of_groups = exponent.reshape(-1).index_select(0, self._groups[key])
        self._take(_Sample(self.index[block], "saved", fmt, found, of_groups))


def sampled(codes: torch.Tensor) -> torch.Tensor:
    """A copy of at most `SAMPLE` of the codes [rows, columns], as bytes."""
    codes, stride = codes.contiguous().view(torch.uint8), _stride(codes)
    count = -(-codes.numel() // stride)
    return codes.as_strided((count,), (stride,), codes.storage_offset()).clone()


def _stride(codes: torch.Tensor) -> int:
    """From one code that is looked at to the next. It has no divisor in common with the number of columns, so
    that all columns get their turn."""
    stride = max(1, -(-codes.numel() // SAMPLE))
    while math.gcd(stride, codes.shape[1]) > 1:
        stride += 1
    return stride


def _reached(codes: torch.Tensor, fmt: torch.dtype | GroupFormat) -> torch.Tensor:
    """Which codes, given as bytes, are not zero, and which are the largest or not finite: bool [2, ...]."""
    sizes = _magnitudes(codes, fmt)
    return torch.stack([sizes != 0, ~(sizes < _largest(fmt))])


@functools.cache
def _largest(fmt: torch.dtype | GroupFormat) -> float:
    """The largest finite magnitude of the format's codes."""
    sizes = _magnitudes(torch.arange(256, dtype=torch.uint8), fmt)
    return sizes[sizes.isfinite()].max().item()


def _magnitudes(codes: torch.Tensor, fmt: torch.dtype | GroupFormat) -> torch.Tensor:
    """What the codes stand for, without signs and scales, FP32."""
    return (fmt.from_codes(codes) if isinstance(fmt, GroupFormat) else codes.view(fmt).float()).abs()


class SavedCodes(SavedStorages):
    """Storages that autograd saves, and the codes in groups among them. `block`: whose forward runs."""

    def __init__(self, counter: CodeCounter, is_left_out):
        super().__init__(is_left_out)
        self.counter, self.block, self._codes = counter, OTHER, None
        # by address
        self._blocks: dict[int, str] = {}

    def nbytes_of(self, blocks: Collection[str]) -> int:
        """Bytes of the storages that those blocks have saved first."""
        return sum(storage.nbytes() for at, storage in self._kept.items() if self._blocks[at] in blocks)

    def forget(self) -> None:
        """Lets go of all storages: backward frees them as ever."""
        self._kept, self._codes = {}, None
        self.counter.formats.clear()

    def _keep(self, address: int, storage: torch.UntypedStorage) -> None:
        super()._keep(address, storage)
        self._blocks[address] = self.block

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        codes, self._codes = self._codes, None
        if codes is not None:
            # a group's exponent is saved after its codes
            fmt = self.counter.formats[codes.data_ptr()]
            self.counter.saved(self.block, Grouped(codes, x.detach(), fmt))
        elif x.dtype == torch.uint8 and x.data_ptr() in self.counter.formats:
            self._codes = x.detach()
        return super()._pack(x)


def layer_names(model: nn.Module) -> list[str]:
    """The layers of `model` that are counted one by one, and "other" for all others."""
    return _rows((name for _, name in _scales_of(model)), (name for name, _ in _blocks_of(model)))


def _rows(layers: Iterable[str], blocks: Iterable[str]) -> list[str]:
    return list(dict.fromkeys((*layers, *blocks, OTHER)))


def _scales_of(model: nn.Module) -> Iterator[tuple[PredictedScale, str]]:
    """The scales that each module, or what stands in for its forward, holds, and the name of the operand's
    layer."""
    for name, module in model.named_modules():
        for attribute, value in attributes_of(module):
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
    """The members of lists of modules, as a model's layers are, except of lists within such members."""
    modules = list(model.named_modules())
    names = {module: name for name, module in modules}
    lists = [module for _, module in modules if isinstance(module, nn.ModuleList)]
    within = {module for outer in lists for module in outer.modules() if module is not outer}
    for module in lists:
        if module not in within:
            for block in module:
                yield names[block], block


class Blocks:
    """A forward whose saved tensors are hooked, between `open` and `close`, or several, as of the chunks of a
    pipeline. `saved` knows whose forward runs.

    Blocks that run as CUDA graphs have no hooks, which would make them run in Python, except the block whose
    turn it is.

    turn: number of the reading.
    watched: names of layers that are looked at in each reading.
    """

    def __init__(self, saved: SavedCodes, turn: int = 0, watched: Collection[str] = ()):
        self.saved, self._context = saved, saved.counting()
        blocks = saved.counter.blocks
        self._taking_turns = [name for name, block in blocks.items() if _is_replayed(block)]
        period = min(TURNS, len(self._taking_turns))
        self._in_turn = {name for i, name in enumerate(self._taking_turns) if i % period == turn % period}
        self.replayed = set(self._taking_turns) - self._in_turn
        self.replayed -= {block for layer in watched for block in _enclosing(layer)}
        # those that were called in this forward, and in all that came to their ends
        self._entered: set[str] = set()
        self._ran: set[str] = set()
        self._nbytes = self._nbytes_in_turn = 0
        self._is_paused = False
        self._hooks: list = []
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        for name, block in self.saved.counter.blocks.items():
            self._hooks.append(block.register_forward_pre_hook(functools.partial(self._enter, name)))
            self._hooks.append(block.register_forward_hook(self._leave, always_call=True))
        self._context.__enter__()

    def close(self, has_failed: bool = False) -> None:
        """has_failed: the forward did not come to its end, so that its bytes do not count."""
        self._leave()
        self._context.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.is_open = [], False
        if not has_failed:
            self._ran |= self._entered
            self._nbytes += self.saved.nbytes
            self._nbytes_in_turn += self.saved.nbytes_of(self._in_turn)
        self._entered = set()
        self.saved.forget()
        # a block that was not called was not looked at either, whosever turn it was
        self.saved.counter.leave_out(self.replayed | (set(self._taking_turns) - self._ran))

    @property
    def nbytes(self) -> int:
        """Bytes that the forwards have saved. A block that was replayed counts like those whose turn it was,
        which are dense layers, too: with what layers share, as tables of RoPE, once for each."""
        of_one = self._nbytes_in_turn // max(len(self._in_turn & self._ran), 1)
        return self._nbytes + len(self.replayed & self._ran) * of_one

    def _enter(self, name: str, *_) -> None:
        self.saved.block = name
        self._entered.add(name)
        # another caller's hooks above these would be removed instead
        if name in self.replayed and self.saved.is_on_top():
            self._context.__exit__(None, None, None)
            self._is_paused = True

    def _leave(self, *_) -> None:
        self.saved.block = OTHER
        if self._is_paused:
            self._is_paused = False
            self._context.__enter__()


def _is_replayed(block: nn.Module) -> bool:
    graphs = graphs_of(block)
    return graphs is not None and graphs.count > 0


def graphs_of(block: nn.Module) -> Graphs | None:
    """What records the CUDA graphs of a block, if anything does."""
    return next((value for _, value in attributes_of(block) if isinstance(value, Graphs)), None)


def _enclosing(name: str) -> Iterator[str]:
    """The names of a module and of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def figures(sums: Sequence[float]) -> dict[str, float]:
    """What the SUMS numbers of a layer, or of several, say; without what they say nothing of."""
    found = {}
    for role, at in ROLES.items():
        codes, others, largest = sums[at : at + 3]
        if codes > 0:
            found[f"{role}_flushed"] = (codes - others) / codes
            found[f"{role}_saturated"] = largest / codes
    predictions, wrong = sums[PREDICTIONS:REPLAYED]
    if predictions > 0:
        found["wrong_scales"] = wrong / predictions
    return found
