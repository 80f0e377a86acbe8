"""When things are measured, and how the numbers come home.

In a watched step sums are computed on the device. One all-reduce adds them over the ranks. They are
copied to the CPU after the step, and read at the end of the next one, when they have long arrived. Other
steps cost one function call for each forward.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from coat_ds.config import CoatConfigError, WatchConfig
from coat_ds.layers.modules.replaced import wraps_compiled
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.saved_bytes import is_weight_of
from coat_ds.watch import codes, states
from coat_ds.watch.codes import Blocks, CodeCounter, SavedCodes, layer_names
from coat_ds.watch.fallback import Fallback
from coat_ds.watch.memory import held_bytes
from coat_ds.watch.outs import Out, Reading, check_folder, grouped, jsonl
from coat_ds.watch.states import Places, StateSampler
from coat_kernels.autograd import watching

logger = logging.getLogger("coat_ds")
# the keys of the block that "act" alone has a use for
LIMITS = ("readings", "update_error", "flushed")


class _Pending(NamedTuple):
    """A reading that is on its way from the device."""

    step: int
    samples: int
    layers: list[str]
    """The names of the rows of `codes`."""
    states: torch.Tensor
    codes: torch.Tensor
    memory: dict[str, int]
    arrived: torch.cuda.Event | None


class Watch:
    """Takes a reading every `config.every` steps, and calls each of `outs` with the `Reading`.

    A reading begins with the first training forward of a step and ends with `end_step`, which the training
    loop calls after each step.

    model: the model with the watched layers; converted, built for COAT, or stock.
    optimizer: the CoatAdamW, of named parameters or of parameters of `model`; or several; None without one.
    config: the block `coat.watch`, as an object or a mapping.
    outs: functions that receive readings; the same on all ranks, and called on `rank`.
    forwards: the modules that are called, if the caller does not call `model` itself.
    places: returns what the optimizer's tensors hold, if they are not the model's parameters.
    masters: returns FP32 masters that are neither weights nor states.
    process_group: ranks that hold the same model or parts of it; sums are over all of them. None: all ranks,
        or this process if `torch.distributed` does not run.
    union: returns the names on all ranks, given the names on this one, if ranks hold different parts.
    rank: the rank that calls `outs`, and whose bytes a reading has.
    steps_done: returns the number of earlier steps; by default steps are counted here.
    samples_done: returns the number of sequences seen; by default 0.
    keep: keep(name, whether) switches FP32 moments of a tensor on or off, if `places` is given.
    say: say(line, level) logs a line; by default each rank logs it.

    Raises TypeError for another optimizer, and CoatConfigError, on all ranks, for a folder that cannot be
    written. If that happens later, as on a full disk, or one of `outs` raises, a warning is logged and
    training continues.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: CoatAdamW | Sequence[CoatAdamW] | None,
        config: WatchConfig | Mapping[str, Any] | None = None,
        outs: Iterable[Out] = (),
        *,
        forwards: Iterable[torch.nn.Module] = (),
        places: Callable[[], Places] | None = None,
        masters: Callable[[], Iterable[torch.Tensor]] = tuple,
        process_group: dist.ProcessGroup | None = None,
        union: Callable[[list[str]], list[str]] | None = None,
        rank: int = 0,
        steps_done: Callable[[], int] | None = None,
        samples_done: Callable[[], int] = int,
        keep: Callable[[str, bool], None] | None = None,
        say: Callable[[str, int], None] | None = None,
    ):
        if not isinstance(config, WatchConfig):
            config = WatchConfig.from_dict({} if config is None else config)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
        for other in optimizers:
            if not isinstance(other, CoatAdamW):
                raise TypeError(
                    "coat_ds.watch.Watch: optimizer: expected a CoatAdamW, several of them or None, found "
                    f"{type(other).__name__}. Give the CoatAdamW that it wraps (Accelerate's holds it as "
                    "`optimizer`), or None, which watches the layers alone."
                )
        self.model, self.optimizers, self.config = model, optimizers, config
        self.outs = [*outs, *([_to_folder(config)] if config.folder else ())]
        self.last: Reading | None = None
        self._forwards, self._rank, self._process_group = list(forwards) or [model], rank, process_group
        if config.every and config.folder:
            self._check_folder()
        # frozen ones, too: they may be trained later on
        own = dict(model.named_parameters())
        self._names, self._union = list(own), union
        # of a converted model some come with its first forward
        self._layers: list[str] | None = None
        self._places = places or functools.partial(_own_places, optimizers, own)
        self._samplers: list[StateSampler] = []
        self._masters, self._samples_done = masters, samples_done
        self._steps, self._steps_done = 0, steps_done or (lambda: self._steps)
        self._say = say or (lambda line, level: logger.log(level, line))
        usual = WatchConfig()
        for name in LIMITS if config.act == "off" else ():
            if (limit := getattr(config, name)) != getattr(usual, name):
                self._say(
                    f'{config.KEY}.{name}: found {limit}, of no effect while act is "off". Set act to "warn" '
                    'or "act", or drop the key.',
                    logging.WARNING,
                )
        keep = keep or functools.partial(_keep, optimizers, own)
        self.fallback = Fallback(model, config, keep, self._say)
        self._said_compiled = False
        self._counter: CodeCounter | None = None
        # that of the reading which has begun
        self._step = 0
        self._blocks: Blocks | None = None
        # of `forwards`, those that it has not seen
        self._due: set[torch.nn.Module] = set()
        self._pending: _Pending | None = None
        # of layers that were replayed, sums of when they last were not
        self._earlier: dict[str, list[float]] = {}
        self._handles: list = []
        self._listen()

    @property
    def is_active(self) -> bool:
        """Whether anything is measured: `every` is above 0, and a reader or an action uses the readings."""
        return self.config.every > 0 and bool(self.outs or self.config.act != "off")

    @property
    def _gives_out(self) -> bool:
        """Whether this rank calls `outs`."""
        return not _runs_distributed() or dist.get_rank() == self._rank

    def _check_folder(self) -> None:
        found, config = [None], self.config
        if self._gives_out:
            try:
                check_folder(config.folder)
            except OSError as error:
                found = [error.strerror]
        group = self._process_group
        if _runs_distributed() and self._rank in dist.get_process_group_ranks(group):
            # else the others would wait for the rank that ends
            dist.broadcast_object_list(found, src=self._rank, group=group)
        if found[0] is not None:
            raise CoatConfigError(
                f"{config.KEY}.folder: found {config.folder!r}, which cannot be written ({found[0]}). Name "
                "another folder, or drop the key."
            )

    def add(self, out: Out) -> None:
        """Has readings given to `out` too. Call it on every rank; one rank calls `out`."""
        self.outs.append(out)
        self._listen()

    def _listen(self) -> None:
        """Puts hooks on the model, once, if anything is to be measured."""
        if self.is_active and not self._handles:
            if self._union is not None:
                own = layer_names(self.model)
                self._names, self._layers = self._union(self._names), self._union(own)
                self.fallback.elsewhere = self._union([name for name in own if self.fallback.linears(name)])
            self._samplers = [StateSampler(o, self._names, self._places) for o in self.optimizers]
            before, after = _Hook(self._before_forward), _Hook(self._after_forward)
            for module in self._forwards:
                self._handles.append(module.register_forward_pre_hook(before))
                self._handles.append(module.register_forward_hook(after, always_call=True))

    @torch.compiler.disable
    def _before_forward(self, in_compiled: bool, module: torch.nn.Module, *_) -> None:
        if not self.is_active or not (module.training and torch.is_grad_enabled()):
            return
        if self._counter is None:
            self._begin(self._steps_done() + 1, in_compiled)
        if self._blocks is not None and module in self._due:
            self._due.remove(module)
            self._blocks.open()

    def _begin(self, step: int, in_compiled: bool) -> None:
        """Begins a reading, if the step is to be watched. in_compiled: whether compiled code runs it."""
        if step % self.config.every:
            return
        self._step, self._counter = step, CodeCounter(self.model, self._layers)
        for sampler in self._samplers:
            sampler.open()
        if in_compiled or any(map(_is_compiled, self.model.modules())):
            # hooks and an observer would have it compiled again for each reading
            if not self._said_compiled:
                self._said_compiled = True
                self._say(
                    "COAT: the model is compiled: readings have moments and bytes, but no codes, nor what is "
                    "saved for backward",
                    logging.INFO,
                )
            return
        watching.observe(self._counter)
        saved = SavedCodes(self._counter, is_weight_of(self.model))
        self._blocks = Blocks(saved, step // self.config.every, self.fallback.suspects)
        self._due = set(self._forwards)

    @torch.compiler.disable
    def _after_forward(self, _: bool, module: torch.nn.Module, _args: tuple, output: Any) -> None:
        if self._blocks is not None and self._blocks.is_open:
            # torch hands on what there is
            has_failed = output is None
            self._blocks.close(has_failed)
            if has_failed:
                self._due.add(module)

    def resume(self, state: Mapping[str, Iterable[str]]) -> None:
        """Before a checkpoint's states are loaded: makes what has fallen back what `state` says, and forgets
        what layers that are replayed told of other weights."""
        self._earlier = {}
        self.fallback.resume(state)

    def go_on_from(self, steps: int) -> None:
        """Counts on from a checkpoint's number of steps, which is the same on all ranks."""
        self._steps = steps

    def end_step(self) -> None:
        """Ends a reading, or passes the previous one on. Call it after each optimizer step on every rank."""
        self._steps += 1
        self.take_in()
        if self._counter is None:
            return
        counter, self._counter = self._counter, None
        blocks, self._blocks = self._blocks, None
        watching.observe(None)
        shapes = [(len(self._names), states.SUMS), (len(counter.index), codes.SUMS)]
        device = next(self.model.parameters()).device
        whole = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]
        for total, found in ((whole[0], s.close()) for s in self._samplers):
            if found is not None:
                total += found.to(device)
        whole[1] += counter.sums(device)
        both = torch.cat([part.view(-1) for part in whole])
        if _runs_distributed():
            dist.all_reduce(both, group=self._process_group)
        arrived = None
        if both.is_cuda:
            home = torch.empty(both.shape, dtype=both.dtype, device="cpu", pin_memory=True)
            home.copy_(both, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            both = home
        held = held_bytes(self.model, self.optimizers, self._masters())
        if blocks is not None:
            held["saved"] = blocks.nbytes
        cut = shapes[0][0] * shapes[0][1]
        self._pending = _Pending(
            self._step,
            self._samples_done(),
            list(counter.index),
            both[:cut].view(shapes[0]),
            both[cut:].view(shapes[1]),
            held,
            arrived,
        )

    def take_in(self) -> None:
        """Takes in the reading that is on its way, if there is one: outs are given it, the fallback judges.
        `end_step` does so one step later. Call it on every rank before a checkpoint is saved."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.arrived is not None:
            pending.arrived.synchronize()
        fallen = sorted(self.fallback.layers + self.fallback.states)
        by_state = dict(zip(self._names, pending.states.tolist(), strict=True))
        by_layer = dict(zip(pending.layers, pending.codes.tolist(), strict=True))
        self._earlier |= {name: row for name, row in by_layer.items() if not row[codes.REPLAYED]}
        # what a layer told before it fell back is no longer so
        for name in fallen:
            self._earlier.pop(name, None)
        whole = {name: self._earlier.get(name, row) for name, row in by_layer.items()}
        groups: dict[str, dict[str, float]] = {}
        for rows, figures in ((by_state, states.figures), (whole, codes.figures)):
            for group, names in grouped(rows).items():
                if found := figures([sum(x) for x in zip(*(rows[n] for n in names), strict=True)]):
                    groups[group] = groups.get(group, {}) | found
        self.last = Reading(pending.step, pending.samples, groups, pending.memory, fallen)
        if self._gives_out:
            for out in self.outs:
                self._give(out, self.last)
        self.fallback.judge(
            pending.step,
            {name: states.figures(row) for name, row in by_state.items()},
            {name: codes.figures(row) for name, row in by_layer.items()},
        )

    def _give(self, out: Out, reading: Reading) -> None:
        try:
            out(reading)
        # as of a service that cannot be reached; other ranks go on, and would wait for this one
        except Exception as error:
            # through Python's logger of this rank: `say` may log on another rank only
            logger.warning(
                "%s: %s raised %r, and has not got the reading of step %d.",
                self.config.KEY,
                getattr(out, "__qualname__", out),
                error,
                reading.step,
                exc_info=True,
            )

    def close(self) -> None:
        """Passes the last reading on and ends watching. Layers are as before; moments keep their formats."""
        if self._blocks is not None and self._blocks.is_open:
            self._blocks.close()
        self.take_in()
        if self._counter is not None:
            self._counter = self._blocks = None
            watching.observe(None)
            for sampler in self._samplers:
                sampler.close()
        for handle in self._handles:
            handle.remove()
        for name in list(self.fallback.layers):
            for forward in self.fallback.linears(name):
                forward.paused = False


class _Hook:
    """A hook on the model. Copies of the model, and what is read from a file, are not watched."""

    def __init__(self, function: Callable[..., None]):
        self.function = function

    def __call__(self, *args) -> None:
        # asked here, which is compiled with the model: the function is not
        self.function(torch.compiler.is_compiling(), *args)

    def __reduce__(self):
        return _Hook, (_nothing,)


def _nothing(*args) -> None:
    pass


def _is_compiled(module: torch.nn.Module) -> bool:
    """Whether it is what `torch.compile` gives, or its own `compile` was called."""
    return module._compiled_call_impl is not None or wraps_compiled(module)


def _to_folder(config: WatchConfig) -> Out:
    """`jsonl` that ends no run: a disk may be full for a while."""
    write = jsonl(config.folder)

    def write_or_say(reading: Reading) -> None:
        try:
            write(reading)
        except OSError as error:
            # through Python's logger of this rank: `say` may log on another rank only
            logger.warning(
                "%s.folder: cannot write to %r (%s): the reading of step %d is not there. Make room.",
                config.KEY,
                config.folder,
                error.strerror,
                reading.step,
            )

    return write_or_say


def _runs_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _own_places(optimizers: Iterable[CoatAdamW], names: Mapping[str, torch.Tensor]) -> Places:
    """Where each of the optimizers' tensors is one of the model's parameters."""
    named = {p: name for name, p in names.items()}
    return {
        p: [(named[p], 0, p.numel())]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
        if p in named
    }


def _keep(
    optimizers: Iterable[CoatAdamW], names: Mapping[str, torch.Tensor], name: str, whether: bool
) -> None:
    """`keep` of optimizers that hold the model's parameters themselves."""
    for optimizer in optimizers:
        optimizer.keep(names[name], whether)
