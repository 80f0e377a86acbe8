"""When readings are taken, and how their numbers reach the CPU.

A reading begins at the end of the step before and ends with its step. Meanwhile hooks on the optimizer and
the observer of codes add up sums on the device. One all-reduce adds them over the ranks. The sums are copied
to the CPU after the step and read at the end of the next step, so that nothing waits for the copy. Other
steps cost nothing: no hook remains.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coat_ds.config import CoatConfigError, WatchConfig
from coat_ds.log import is_first_rank, log_here
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.watch import codes, states
from coat_ds.watch.codes import CodeCounter, graphs_of, in_turn, layer_names
from coat_ds.watch.readings import Reading, ReadingCallback, append, grouped
from coat_ds.watch.states import StateSampler
from coat_kernels.autograd import observers
from coat_kernels.graphs import Graphs


class Watch:
    """Takes a reading every `config.every` steps, and passes the `Reading` to `callbacks` and to the run's
    folder.

    A reading ends with `end_step`, which the training loop calls after each step.

    model: the model with the watched layers; converted, built for COAT, or stock.
    optimizer: the CoatAdamW of the model's parameters; or several; None without one.
    config: the block `coat.watch`, as an object or a mapping.
    callbacks: functions that receive readings; the same number on all ranks, and called on each.
    union: returns the names on all ranks, given the names on this one, if ranks hold different parts of a
        model.

    Raises TypeError for another optimizer, and CoatConfigError, on rank 0, for a folder that cannot be
    written. If that happens later, as on a full disk, or one of `callbacks` raises, a warning is logged and
    training continues.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: CoatAdamW | Sequence[CoatAdamW] | None,
        config: WatchConfig | Mapping[str, Any] | None = None,
        callbacks: Iterable[ReadingCallback] = (),
        *,
        union: Callable[[list[str]], list[str]] = list,
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
        self.callbacks = list(callbacks)
        if config.every and config.folder:
            self.callbacks.append(_to_folder(config))
        self.last: Reading | None = None
        self.steps = 0
        # frozen ones, too: they may be trained later on
        self._own = dict(model.named_parameters())
        self._union = union
        # names of tensors and of layers, the same on all ranks: the latter once a step has built all of them
        self._names: list[str] = []
        self._layers: list[str] = []
        self._samplers: list[StateSampler] = []
        # while a reading is taken
        self._counter: CodeCounter | None = None
        self._eager: list[Graphs] = []
        # the reading that is on its way from the device: its step; the sums of tensors, then those of layers,
        # in one vector; and the event of their arrival
        self._pending: tuple[int, torch.Tensor, torch.cuda.Event | None] | None = None
        # of each layer, sums of the last reading that had any: layers that are replayed take turns
        self._sums: dict[str, list[float]] = {}
        self._begin()

    @property
    def is_active(self) -> bool:
        """Whether anything is measured: `every` is above 0, and somewhere the readings go."""
        return self.config.every > 0 and bool(self.callbacks)

    def add(self, callback: ReadingCallback) -> None:
        """Passes readings to `callback`, too. Call it on every rank."""
        self.callbacks.append(callback)
        self._begin()

    def _begin(self) -> None:
        """Begins a reading if the next step is to be watched."""
        next_step = self.steps + 1
        if self._counter is not None or not self.is_active or next_step % self.config.every:
            return
        if not self._names:
            self._names = self._union(list(self._own))
            numbers = {p: self._names.index(name) for name, p in self._own.items()}
            self._samplers = [StateSampler(o, numbers, len(self._names)) for o in self.optimizers]
        for sampler in self._samplers:
            sampler.open()
        self._eager = in_turn(graphs_of(self.model), next_step // self.config.every)
        for graphs in self._eager:
            graphs.eager = True
        self._counter = CodeCounter(self.model)
        observers.observe(self._counter)

    def _stop(self) -> tuple[CodeCounter, list[torch.Tensor]]:
        """Ends measuring. Returns what was counted, and the sums of the optimizers."""
        counter, self._counter = self._counter, None
        observers.observe(None)
        for graphs in self._eager:
            graphs.eager = False
        self._eager = []
        return counter, [sums for s in self._samplers if (sums := s.close()) is not None]

    def go_on_from(self, steps: int) -> None:
        """Counts on from a checkpoint's number of steps, which is the same on all ranks."""
        if self._counter is not None:
            self._stop()
        self.steps = steps
        self._begin()

    def end_step(self, step: int | None = None) -> None:
        """Ends a reading, or passes the previous one on. Call it after each optimizer step on every rank.

        step: the number of the step, if the loop counts; by default steps are counted here.
        """
        self.steps = self.steps + 1 if step is None else step
        self.flush()
        if self._counter is not None:
            self._send(*self._stop())
        self._begin()

    def _send(self, counter: CodeCounter, found: list[torch.Tensor]) -> None:
        """Adds the sums over all ranks and sends them to the CPU."""
        if not self._layers:
            self._layers = self._union(layer_names(self.model))
        device = next(self.model.parameters()).device
        total = torch.zeros(len(self._names), states.SUMS, dtype=torch.float64, device=device)
        for sums in found:
            total += sums.to(device)
        both = torch.cat([total.view(-1), counter.sums(self._layers, device).view(-1)])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(both)
        arrived = None
        if both.is_cuda:
            home = torch.empty(both.shape, dtype=both.dtype, device="cpu", pin_memory=True)
            home.copy_(both, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            both = home
        self._pending = self.steps, both, arrived

    def flush(self) -> None:
        """Passes the pending reading to the callbacks, if there is one. `end_step` calls this one step after
        the reading."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, sums, arrived = pending
        if arrived is not None:
            arrived.synchronize()
        cut = len(self._names) * states.SUMS
        by_state = _by_name(self._names, sums[:cut])
        by_layer = _by_name(self._layers, sums[cut:])
        self._sums |= {name: row for name, row in by_layer.items() if any(row)}
        groups: dict[str, dict[str, float]] = {}
        for rows, figures in ((by_state, states.figures), (self._sums, codes.figures)):
            for group, names in grouped(rows).items():
                if found := figures([sum(x) for x in zip(*(rows[n] for n in names), strict=True)]):
                    groups[group] = groups.get(group, {}) | found
        self.last = Reading(step, groups)
        for callback in self.callbacks:
            self._give(callback, self.last)

    def _give(self, callback: ReadingCallback, reading: Reading) -> None:
        try:
            callback(reading)
        # as of a service that cannot be reached; other ranks continue, and would wait for this one
        except Exception as error:
            name = getattr(callback, "__qualname__", callback)
            log_here(
                f"{self.config.KEY}: {name} raised {error!r}, and has not got the reading of step "
                f"{reading.step}.",
                error=error,
            )

    def close(self) -> None:
        """Passes the last reading on and ends watching."""
        self.flush()
        if self._counter is not None:
            self._stop()


def _by_name(names: Sequence[str], sums: torch.Tensor) -> dict[str, list[float]]:
    return dict(zip(names, sums.view(len(names), -1).tolist(), strict=True))


def _to_folder(config: WatchConfig) -> ReadingCallback:
    """A callback that appends to the file of the run, which rank 0 writes."""
    if not is_first_rank():
        # it has the same readings
        return lambda reading: None
    try:
        Path(config.folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.folder):
            pass
    except OSError as error:
        raise CoatConfigError(
            f"{config.KEY}.folder: found {config.folder!r}, which cannot be written ({error.strerror}). Name "
            "another folder, or drop the key."
        ) from error
    return partial(append, config.folder)
