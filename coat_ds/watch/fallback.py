"""What is done where errors stay too large: BF16 for a linear layer, FP32 for a tensor's moments."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from coat_ds.config import WatchConfig
from coat_ds.layers.modules.replaced import replaced
from coat_ds.log import say
from coat_ds.watch.codes import graphs_of, is_around

# figures of a layer that have a limit
FLUSHED = ("input_flushed", "gradient_flushed")
# consecutive readings above a limit after which `act` takes effect
READINGS = 3
# under which checkpoints have `Fallback.state`
KEY = "coat_watch"


class Fallback:
    """Counts consecutive readings above a limit, and acts.

    All ranks are given the same figures, so that they decide the same.

    keep: keep(name, whether) has the optimizer keep a tensor's moments in FP32, or no more.
    """

    def __init__(self, model: nn.Module, config: WatchConfig, keep: Callable[[str, bool], None]):
        self.model, self.config, self._keep = model, config, keep
        self._over: Counter[tuple[str, str]] = Counter()
        self.layers: list[str] = []
        self.states: list[str] = []
        # layers that can fall back on some rank, where ranks hold different ones
        self.elsewhere: Collection[str] = ()

    def judge(
        self, step: int, states: Mapping[str, dict[str, float]], layers: Mapping[str, dict[str, float]]
    ) -> None:
        """Takes figures by tensor and by layer, and acts on those above a limit in enough readings.

        A NaN is above no limit. What has no figures in a reading is left as it was.
        """
        if self.config.act == "off":
            return
        for name, found in states.items():
            if (error := found.get("update_error")) is not None:
                self._count(step, "states", name, error, self.config.update_error, "the update's error")
        for name, found in layers.items():
            if shares := [found[figure] for figure in FLUSHED if figure in found]:
                what = "the share of flushed codes"
                self._count(step, "layers", name, max(shares), self.config.flushed, what)

    @property
    def suspects(self) -> list[str]:
        """Layers above a limit in the last reading that had them, except those that have fallen back, which
        have no codes any more."""
        over = (name for (kind, name), count in self._over.items() if kind == "layers" and count)
        return [name for name in over if name not in self.layers]

    def _count(self, step: int, kind: str, name: str, found: float, limit: float, what: str) -> None:
        count = self._over[kind, name] = self._over[kind, name] + 1 if found > limit else 0
        if count != READINGS or name in getattr(self, kind):
            return
        line = f"step {step}: {name}: {what} was {found:.3g}, above {limit:g}, {count} readings in a row"
        if self.config.act == "warn":
            line += '. "act": "act" in coat.watch would have it fall back.'
        elif kind == "layers" and name not in self.elsewhere and not self.linears(name):
            line += ". It is no linear layer of COAT's and is not changed."
        else:
            self._set(kind, name, True)
            to = "computes in BF16" if kind == "layers" else "keeps FP32 moments"
            line += f": it {to} from now on"
        say(line, logging.WARNING)

    def _set(self, kind: str, name: str, falls: bool) -> None:
        names = getattr(self, kind)
        names.append(name) if falls else names.remove(name)
        if kind == "states":
            self._keep(name, falls)
            return
        for forward in self.linears(name):
            forward.paused = falls
        # graphs replay what the layer did before
        for outer, graphs in graphs_of(self.model).items():
            if is_around(outer, name):
                graphs.clear()

    def linears(self, name: str) -> list[Any]:
        """The objects of a reading's layer that can be `paused`: a module that was built for COAT, or the
        replacement of a converted module's forward; for a joint GEMM the replacement of each module."""
        modules = dict(self.model.named_modules())
        if name in modules:
            forwards = [modules[name], replaced(modules[name])]
        else:
            # a joint GEMM, named after the module that holds it
            holder, _, attribute = name.rpartition(".")
            forward = replaced(modules[holder]) if holder in modules else None
            joint: Iterable[nn.Module] = ()
            if attribute == "qkv":
                joint = getattr(forward, "projections", ())[:3]
            elif attribute == "both":
                joint = getattr(forward, "first", ())
            forwards = [replaced(linear) for linear in joint]
        return [forward for forward in forwards if hasattr(forward, "paused")]

    def state(self) -> dict[str, list[str]]:
        """What has fallen back, for a checkpoint."""
        return {"layers": list(self.layers), "states": list(self.states)}

    def resume(self, state: Mapping[str, Iterable[str]]) -> None:
        """As `restore`, with a checkpoint's state, if the config lets this run fall back; logs it. Call
        it before states are loaded, so that FP32 moments meet moments in FP32."""
        names = ", ".join(name for kind in state.values() for name in kind)
        if self.config.act != "act":
            state = {}
        self.restore(state)
        if names and state:
            say(f"as in the checkpoint's run, these have fallen back: {names}")
        elif names:
            say(
                f"the checkpoint's run had {names} fall back, and this one does not: coat.watch.act is "
                f"{self.config.act!r}.",
                logging.WARNING,
            )

    def restore(self, state: Mapping[str, Iterable[str]]) -> None:
        """Makes what has fallen back what `state` says; nothing, of an empty one."""
        self._over.clear()
        for kind in ("layers", "states"):
            wanted, present = list(state.get(kind, ())), list(getattr(self, kind))
            for name in present:
                if name not in wanted:
                    self._set(kind, name, False)
            for name in wanted:
                if name not in present:
                    self._set(kind, name, True)
