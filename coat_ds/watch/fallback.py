"""What is done where errors stay too large: BF16 for a linear layer, FP32 for a tensor's moments."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from coat_ds.config import WatchConfig
from coat_ds.layers.modules.replaced import replaced
from coat_ds.watch.codes import graphs_of

ROLES = ("input_flushed", "gradient_flushed")
# under which checkpoints have `Fallback.state`
KEY = "coat_watch"


class Fallback:
    """Counts readings in a row that pass a limit, and acts.

    All ranks are given the same figures, so that they decide the same.

    keep: keep(name, whether) has the optimizer keep a tensor's moments in FP32, or no more.
    say: takes a line for the log, and its level.
    """

    elsewhere: Collection[str]
    """Names of layers that can fall back on some rank, where ranks hold different ones."""

    def __init__(
        self,
        model: nn.Module,
        config: WatchConfig,
        keep: Callable[[str, bool], None],
        say: Callable[[str, int], None],
    ):
        self.model, self.config, self._keep, self._say = model, config, keep, say
        self.elsewhere = ()
        self._over: Counter[str] = Counter()
        self.layers: list[str] = []
        self.states: list[str] = []

    def judge(
        self, step: int, states: Mapping[str, dict[str, float]], layers: Mapping[str, dict[str, float]]
    ) -> None:
        """Takes figures by tensor and by layer, and acts where they have passed a limit often enough.

        A NaN passes no limit. What has no figures in a reading is left as it was.
        """
        if self.config.act == "off":
            return
        for name, found in states.items():
            if (error := found.get("update_error")) is not None:
                self._count(step, name, "states", error, self.config.update_error, "the update's error")
        for name, found in layers.items():
            if shares := [found[role] for role in ROLES if role in found]:
                what = "the share of flushed codes"
                self._count(step, name, "layers", max(shares), self.config.flushed, what)

    @property
    def suspects(self) -> list[str]:
        """Layers that passed a limit in the last reading that had them, except layers that have fallen
        back: they have no codes any more."""
        found = (key.partition(":") for key, readings in self._over.items() if readings)
        return [name for kind, _, name in found if kind == "layers" and name not in self.layers]

    def _count(self, step: int, name: str, kind: str, found: float, limit: float, what: str) -> None:
        key = f"{kind}:{name}"
        self._over[key] = self._over[key] + 1 if found > limit else 0
        if self._over[key] != self.config.readings or name in getattr(self, kind):
            return
        said = f"COAT: step {step}: {name}: {what} was {found:.3g}, above {limit:g}, {self._over[key]} "
        said += "reading in a row" if self._over[key] == 1 else "readings in a row"
        if self.config.act == "warn":
            self._say(f'{said}. "act": "act" in coat.watch would have it fall back.', logging.WARNING)
            return
        if kind == "layers" and name not in self.elsewhere and not self.linears(name):
            self._say(f"{said}. It is no linear layer of COAT's and is not changed.", logging.WARNING)
            return
        self._set(kind, name, True)
        to = "computes in BF16" if kind == "layers" else "keeps FP32 moments"
        self._say(f"{said}: it {to} from now on", logging.WARNING)

    def _set(self, kind: str, name: str, falls: bool) -> None:
        if kind == "states":
            self._keep(name, falls)
        else:
            for forward in self.linears(name):
                forward.paused = falls
            self._drop_graphs(name)
        names = getattr(self, kind)
        names.append(name) if falls else names.remove(name)

    def _drop_graphs(self, name: str) -> None:
        """Drops the CUDA graphs of all modules around a layer: they replay what it did before."""
        for outer, module in self.model.named_modules():
            graphs = graphs_of(module)
            if graphs is not None and f"{name}.".startswith(f"{outer}." if outer else ""):
                graphs.clear()

    def linears(self, name: str) -> list[Any]:
        """The objects of a reading's layer that can be `paused`: a module that was built for COAT, or the
        replacement of a converted module's forward; for a joint GEMM the replacement of each module."""
        modules = dict(self.model.named_modules())
        if name in modules:
            forwards = [modules[name], replaced(modules[name])]
        else:
            # a joint product, named after what holds it
            holder, _, attribute = name.rpartition(".")
            forward = replaced(modules[holder]) if holder in modules else None
            if attribute == "qkv" and hasattr(forward, "projections"):
                forwards = [replaced(linear) for linear in forward.projections[:3]]
            elif attribute == "both" and hasattr(forward, "first"):
                forwards = [replaced(linear) for linear in forward.first]
            else:
                forwards = []
        return [forward for forward in forwards if hasattr(forward, "paused")]

    def state(self) -> dict[str, list[str]]:
        """What has fallen back, for a checkpoint."""
        return {"layers": list(self.layers), "states": list(self.states)}

    def resume(self, state: Mapping[str, Iterable[str]]) -> None:
        """As `restore`, with a checkpoint's state, if the config lets this run fall back; logs it. Call
        it before states are loaded, so that FP32 moments meet moments in FP32."""
        names = [name for kind in state.values() for name in kind]
        if names and self.config.act != "act":
            self._say(
                f"COAT: the checkpoint's run had {', '.join(names)} fall back, and this one does not: "
                f"coat.watch.act is {self.config.act!r}.",
                logging.WARNING,
            )
            state = {}
        self.restore(state)
        if names and state:
            self._say(
                f"COAT: as in the checkpoint's run, these have fallen back: {', '.join(names)}", logging.INFO
            )

    def restore(self, state: Mapping[str, Iterable[str]]) -> None:
        """Makes what has fallen back what `state` says; nothing, of an empty one."""
        self._over.clear()
        for kind in ("layers", "states"):
            wanted = list(state.get(kind, ()))
            for name in [n for n in getattr(self, kind) if n not in wanted]:
                self._set(kind, name, False)
            for name in [n for n in wanted if n not in getattr(self, kind)]:
                self._set(kind, name, True)
