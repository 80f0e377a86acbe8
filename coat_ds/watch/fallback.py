"""What is done where errors stay too large: BF16 for a linear layer, FP32 for a tensor's moments."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from coat_ds.config import WatchConfig
from coat_ds.layers.linear import Fp8Linear
from coat_ds.layers.replaced import replaced

ROLES = ("input_flushed", "gradient_flushed")


class Fallback:
    """Counts readings in a row that pass a limit, and acts.

    keep: keep(name, whether) has the optimizer keep a tensor's moments in FP32, or no more.
    say: takes a line for the log, and its level.
    """

    def __init__(
        self,
        model: nn.Module,
        config: WatchConfig,
        keep: Callable[[str, bool], None],
        say: Callable[[str, int], None],
    ):
        self.model, self.config, self._keep, self._say = model, config, keep, say
        self._over: Counter[str] = Counter()
        self.layers: list[str] = []
        self.states: list[str] = []

    def judge(
        self, step: int, states: Mapping[str, dict[str, float]], layers: Mapping[str, dict[str, float]]
    ) -> None:
        """Takes figures by tensor and by layer, and acts where they have passed a limit often enough.

        A NaN passes no limit.
        """
        if self.config.act == "off":
            return
        for name, found in states.items():
            error = found.get("update_error", 0.0)
            self._count(step, name, "states", error, self.config.update_error, "the update's error")
        for name, found in layers.items():
            share = max(found.get(role, 0.0) for role in ROLES)
            self._count(step, name, "layers", share, self.config.flushed, "the share of flushed codes")

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
        if kind == "layers" and not self.linears(name):
            self._say(f"{said}. It is no converted linear layer and stays as it is.", logging.WARNING)
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
        names = getattr(self, kind)
        names.append(name) if falls else names.remove(name)

    def linears(self, name: str) -> list[Fp8Linear]:
        """The converted linear layers that a reading's layer stands for: itself, or those of a joint
        product."""
        modules = dict(self.model.named_modules())
        if name in modules:
            forwards = [replaced(modules[name])]
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
        return [forward for forward in forwards if type(forward) is Fp8Linear]

    def state(self) -> dict[str, list[str]]:
        """What has fallen back, for a checkpoint."""
        return {"layers": list(self.layers), "states": list(self.states)}

    def restore(self, state: Mapping[str, Iterable[str]]) -> None:
        """Makes what has fallen back what `state` says; nothing, of an empty one."""
        self._over.clear()
        for kind in ("layers", "states"):
            wanted = list(state.get(kind, ()))
            for name in [n for n in getattr(self, kind) if n not in wanted]:
                self._set(kind, name, False)
            for name in [n for n in wanted if n not in getattr(self, kind)]:
                self._set(kind, name, True)


def keeper(optimizer, names: Mapping[str, torch.Tensor], relink: Callable[[], None]):
    """The `keep` of a `Fallback`. relink: has the optimizer arrange its moments anew."""

    def keep(name: str, whether: bool) -> None:
        optimizer.keep(names[name], whether)
        relink()

    return keep
