"""What ZeRO-3's hooks take from layers that are no units (`layer_units`), given back.

Stage 3 hands the inputs and outputs of every module through nodes of autograd, which gather its weights for
backward and release them again. Behind a node a tensor is another object, without the notes of
`coat_kernels.origin`: a linear layer behind a norm would keep its input. In a unit there are no nodes between
modules; layers with frozen parameters, and all with `zero3_layer_units` false, need this. And every module
pays for nodes, though only those with weights of their own have something to gather: that is for models whose
layers nobody makes units.
"""

import functools
import inspect

import torch

from coat_ds.patches import Patch
from coat_kernels.origin import share_notes

# where DeepSpeed's hooks look up the functions of a module
NODES = tuple(
    Patch(
        "ZeRO-3's nodes",
        "deepspeed",
        f"deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload.{name}",
        "notes on tensors survive ZeRO-3's hooks, and modules without weights need no nodes",
        instance=True,
    )
    for name in ("pre_bwd_fn", "post_bwd_fn")
)


class _Node:
    """A function of DeepSpeed's behind which tensors of `module` keep their notes; with `only_weights`, left
    out where the module has none to gather.
    """

    def __init__(self, module: torch.nn.Module, function: type[torch.autograd.Function], only_weights: bool):
        self.module, self.function, self.only_weights = module, function, only_weights
        # torch asks for it in each call, and makes it anew unless it is noted
        function.forward.__signature__ = inspect.signature(function.forward)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.function.apply(x)
        if self.only_weights and not _has_weights(self.module):
            return x
        y = self.function.apply(x)
        # weights change behind autograd's back
        return y if isinstance(x, torch.nn.Parameter) else share_notes(x, y)


def _has_weights(module: torch.nn.Module) -> bool:
    """Whether DeepSpeed gathers anything for this very module: weights of its own, of others that it has been
    found to use, or those of all its parts."""
    own = vars(module)
    return bool(own["_parameters"] or own.get("_external_params") or own.get("_z3_leaf"))


def lighten_module_hooks(model: torch.nn.Module) -> None:
    """Has ZeRO-3's hooks of `model`, if there are any, hand notes on and pass by modules without weights.

    Where something is frozen every module keeps its nodes: frozen weights that a recomputed forward gathers
    are released by DeepSpeed behind the module whose backward runs, with or without weights of its own.
    """
    only_weights = all(p.requires_grad for p in model.parameters())
    for module in model.modules():
        for node in NODES:
            if node.attribute in vars(module):
                node.apply(functools.partial(_Node, module, only_weights=only_weights), on=module)
