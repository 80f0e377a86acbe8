"""FP8 experts under transformers' expert parallelism (`ep_size`): each rank holds some experts of a layer.

transformers replaces an expert layer's forward by a function that sends rows to the ranks of their experts,
calls the layer's own forward there, and sends the results back. The rows that it sends stay in BF16.
"""

import inspect
import sys
from typing import Any

import torch

from coat_ds.config import ActivationsConfig
from coat_ds.layers.modules.experts import Fp8Experts

# the `ep_implementation` that gives a layer the rows of its own experts only
NAME = "all_to_all"


def _transformers() -> Any:
    """transformers' module of expert parallelism; None if it is not imported, since no such layer exists
    then, and before transformers 5.23, which has no `EPImplementation`."""
    module = sys.modules.get("transformers.distributed.expert_parallel")
    return module if hasattr(module, "EPImplementation") else None


def dispatch_of(module: torch.nn.Module) -> Any:
    """transformers' `EPImplementation` in the forward of `module`; None if there is none."""
    forward = module.__dict__.get("forward")
    if _transformers() is None or not inspect.isfunction(forward):
        return None
    found = inspect.getclosurevars(forward).nonlocals.get("implementation")
    return found if isinstance(found, _transformers().EPImplementation) else None


def why_not(dispatch: Any) -> str | None:
    """Why the experts of such a layer keep their forward; None if they can be converted."""
    if type(dispatch) in (_transformers().AutoEP, _transformers().AllToAllEP):
        return None
    return f"transformers' {type(dispatch).__name__} calls it, not ep_implementation {NAME!r}"


class TransformersEPExperts(Fp8Experts):
    """The forward of an expert layer whose rows come from other ranks."""

    local_rows = True

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig, dispatch: Any):
        super().__init__(module, activations)
        self.meshes = dispatch.ep_mesh, dispatch.tp_mesh

    def install(self) -> None:
        ep_mesh, tp_mesh = self.meshes
        self.module.forward = self.experts
        # replaces the forward by a function that calls it
        style = _transformers().EpDispatchExpertsParallel()
        style.install_forward(self.module, ep_mesh, tp_mesh=tp_mesh, ep_implementation=NAME)
        self.dispatched = self.module.forward
        super().install()

    def compute(self, *args: torch.Tensor) -> torch.Tensor:
        return self.dispatched(*args)

    def experts(self, rows: torch.Tensor, expert: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """rows [n, h], the expert of each on this rank and its weight [n, 1] -> [n, h]."""
        if self.check_tensor(rows):
            return super().compute(rows, expert, weights)
        return type(self.module).forward(self.module, rows, expert, weights)
