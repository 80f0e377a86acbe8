"""ZeRO-3's hooks on layers that are no units (`layer_units`): they keep notes on tensors, and skip modules
without weights.

Stage 3 passes the inputs and outputs of every module through autograd nodes, which gather its weights for
backward and release them afterwards. A node returns another tensor object, without the notes of
`coat_kernels.autograd.origin`. Without the note a linear layer after a norm would save its input a second
time. We copy the notes after each node. Nodes also cost CPU time in every module, but only modules with
weights have anything to gather: we drop the nodes of the others.

Units have no nodes between their modules. Layers with frozen parameters need this patch, and all layers if
`zero3_layer_units` is false.
"""

import functools
import inspect

import torch

from coat_ds.patches import Patch
from coat_kernels.autograd.origin import share_notes

# the attributes in which DeepSpeed's hooks find the nodes of a module
NODES = tuple(
    Patch(
        "ZeRO-3's nodes",
        f"deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload.{name}",
        "notes on tensors survive ZeRO-3's hooks, and modules without weights need no nodes",
        instance=True,
    )
    for name in ("pre_bwd_fn", "post_bwd_fn")
)


class _Node:
    """A node of DeepSpeed that copies the notes on tensors of `module`. With `only_weights` it does nothing
    if the module has no weights to gather.
    """

    def __init__(self, module: torch.nn.Module, function: type[torch.autograd.Function], only_weights: bool):
        self.module, self.function, self.only_weights = module, function, only_weights
        # torch reads the signature in each call, and computes it each time unless it is stored
        function.forward.__signature__ = inspect.signature(function.forward)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.function.apply(x)
        own = vars(self.module)
        # DeepSpeed gathers these, "external" ones that the module uses, and those of all parts of a leaf
        has_weights = own["_parameters"] or own.get("_external_params") or own.get("_z3_leaf")
        if self.only_weights and not has_weights:
            return x
        y = self.function.apply(x)
        # autograd does not see all changes of weights, so weights share no notes
        return y if isinstance(x, torch.nn.Parameter) else share_notes(x, y)


def lighten_module_hooks(model: torch.nn.Module) -> None:
    """Patches the nodes of ZeRO-3's hooks of `model`, if there are any.

    If any parameter is frozen, every module keeps its nodes: DeepSpeed releases the frozen weights that a
    recomputed forward has gathered after the backward of any module, with or without weights.
    """
    only_weights = all(p.requires_grad for p in model.parameters())
    for module in model.modules():
        for node in NODES:
            if node.attribute in vars(module):
                node.apply(functools.partial(_Node, module, only_weights=only_weights), on=module)
