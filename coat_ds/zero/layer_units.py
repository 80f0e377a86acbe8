"""Whole layers as ZeRO-3's units, in place of their single modules.

Stage 3 puts hooks and autograd nodes around every module. For the small modules of a layer these take more
CPU time than the modules themselves. A unit has one pair of nodes: its weights are gathered when it begins
and released when it ends, forward and backward.

DeepSpeed's leaf modules are nearly such units. We mark a layer as a leaf while the engine is built, so that
its parts get no hooks. Then we remove the mark and register the layer's parameters as its own "external"
parameters, because a leaf has two faults:

- DeepSpeed reduces all gradients of a leaf in one hook after its backward. If the layer ran forward twice, or
  the gradient of its input is not needed, the gradients are not complete by then. In a unit each gradient is
  reduced when it is ready, as in other modules, and is not held until the layer ends.
- DeepSpeed keeps parameters gathered if a following module owns them. It does not see the parameters of a
  leaf's parts. Embeddings would stay gathered until the step ends.

DeepSpeed prefetches up to `stage3_prefetch_bucket_size` elements: by default a quarter of a large layer, and
the GPU waits for the rest. If the config does not set this size, we set it to the size of a whole unit.

DeepSpeed's nodes process positional arguments only, and Megatron passes `hidden_states` by name. A unit makes
it positional; otherwise backward would release no weights.

An attribute `zero3_unit`, False, marks a layer that can be a unit; it is True while the layer is a unit.
Converted layers of Hugging Face's models are units too.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.hooks import RemovableHandle

from coat_ds.layers.modules.converted_forward import converted_forward
from coat_ds.log import by_reason
from coat_ds.optim.shards import shape_of
from coat_ds.patches import Patch, wrapping

INPUT = "hidden_states"
# classes of layers without `zero3_unit`, Megatron's and Hugging Face's; subclasses count too
OTHERS = (
    "megatron.core.transformer.transformer_layer.TransformerLayer",
    "megatron.core.ssm.mamba_layer.MambaLayer",
    "transformers.modeling_layers.GradientCheckpointingLayer",
)


HOOKS = Patch(
    "units of ZeRO-3",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks",
    "while an engine is built: gradients of a unit are reduced one by one",
    parameters=(),
)

REGISTERS = Patch(
    "units of ZeRO-3",
    "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module",
    "units stay units when hooks are registered again, as TRL does after each generation",
    parameters=("module", "..."),
)


class LayerUnits:
    """The layers of `model` that become units of ZeRO-3, and why other layers do not.

    wanted: the block's `zero3_layer_units`. zero: DeepSpeed's config of ZeRO; no units below stage 3.
    """

    def __init__(self, model: torch.nn.Module | None, wanted: bool | None, zero):
        self.chosen: dict[str, torch.nn.Module] = {}
        self.reasons: dict[str, str] = {}
        # hooks of the layers that have become units
        self._handles: dict[torch.nn.Module, RemovableHandle] = {}
        # DeepSpeed's object that puts hooks on modules
        self._offload: object | None = None
        self._zero = zero
        if model is None or zero.stage != 3:
            return
        # the modules that own each parameter
        users: dict[torch.nn.Parameter, list[torch.nn.Module]] = {}
        for module in model.modules():
            for p in module.parameters(recurse=False):
                users.setdefault(p, []).append(module)
        trained = any(p.requires_grad for p in model.parameters())
        for name, layer in _layers(model, wanted).items():
            off = "coat.zero3_layer_units is false"
            reason = off if wanted is False else _obstacle(layer, users, trained)
            if reason is None:
                self.chosen[name] = layer
            else:
                self.reasons[name] = reason

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """A context in which DeepSpeed's engine is built, with hooks around the chosen layers only."""
        if not self.chosen:
            yield
            return
        units = self.chosen.values()
        if "prefetch_bucket_size" not in self._zero.model_fields_set:
            largest = max(sum(shape_of(p).numel() for p in layer.parameters()) for layer in units)
            self._zero.prefetch_bucket_size = max(self._zero.prefetch_bucket_size, largest)

        def create_hooks(create: Callable, wrapper) -> None:
            _forget_leaves(units)
            create(wrapper)

        with _as_leaves(units), HOOKS.applied(wrapping(create_hooks)):
            yield

    def complete(self, optimizer) -> None:
        """Makes the chosen layers units, after the engine with this `optimizer` was built."""
        from deepspeed.runtime.zero.partition_parameters import register_external_parameter

        for name, layer in list(self.chosen.items()):
            if "post_bwd_fn" not in vars(layer):
                self.reasons[name] = "inside of a leaf_module of the config"
                del self.chosen[name]
                continue
            for p in layer.parameters():
                register_external_parameter(layer, p)
            # runs before DeepSpeed's own hooks
            hook = layer.register_forward_pre_hook(_input_first, prepend=True, with_kwargs=True)
            self._handles[layer] = hook
            layer.zero3_unit = True
        if self.chosen:
            # in an engine without an optimizer, the offload object is in the optimizer's place
            self._offload = getattr(optimizer, "parameter_offload", optimizer)
            REGISTERS.apply(wrapping(self._register), on=self._offload)

    def _register(self, register: Callable, module: torch.nn.Module, *args, **kwargs) -> None:
        # DeepSpeed's method calls itself for the modules inside
        if module is not self._offload.module:
            return register(module, *args, **kwargs)
        units = list(self._handles)
        with _as_leaves(units):
            register(module, *args, **kwargs)
        _forget_leaves(units)

    def undo(self) -> None:
        """Undoes all changes to the layers. May be called repeatedly."""
        if self._offload is not None:
            REGISTERS.remove(on=self._offload)
            self._offload = None
        for layer, handle in self._handles.items():
            from deepspeed.runtime.zero.partition_parameters import unregister_external_parameter

            for p in layer.parameters():
                unregister_external_parameter(layer, p)
            layer.zero3_unit = False
            handle.remove()
        self.chosen, self._handles = {}, {}

    def summary(self) -> str | None:
        """A text for the log; None if the model has no layers that could be units."""
        if not self.chosen and not self.reasons:
            return None
        text = f"ZeRO-3 gathers {len(self.chosen)} of {len(self.chosen) + len(self.reasons)} layers whole"
        for count, names, reason in by_reason(self.reasons):
            text += f"; module by module {count} ({names}): {reason}"
        return text


def _layers(model: torch.nn.Module, wanted: bool | None) -> dict[str, torch.nn.Module]:
    """Layers with parameters, by name; no layer is inside another one."""
    found: dict[str, torch.nn.Module] = {}
    inside: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside and _is_layer(module, wanted) and any(True for _ in module.parameters()):
            found[name] = module
            inside.update(module.modules())
    return found


def _is_layer(module: torch.nn.Module, wanted: bool | None) -> bool:
    if hasattr(module, "zero3_unit"):
        return True
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__)
    if not any(name in OTHERS for name in names):
        return False
    return wanted is True or any(converted_forward(part) is not None for part in module.modules())


def _obstacle(
    layer: torch.nn.Module, users: dict[torch.nn.Parameter, list[torch.nn.Module]], trained: bool
) -> str | None:
    """Why `layer` cannot be a unit; None if it can. A frozen layer can if the model is not `trained` at all,
    such as a reference model."""
    parts = set(layer.modules())
    for p in layer.parameters():
        if trained and not p.requires_grad:
            return "frozen parameters"
        if not parts.issuperset(users[p]):
            return "parameters shared with another module"
    return None


def _input_first(layer: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if not args and INPUT in kwargs:
        args = (kwargs.pop(INPUT),)
    return args, kwargs


@contextlib.contextmanager
def _as_leaves(units: Iterable[torch.nn.Module]) -> Iterator[None]:
    """A context in which DeepSpeed puts hooks around `units`, and none on the modules inside."""
    from deepspeed.utils import set_z3_leaf_module

    for unit in units:
        set_z3_leaf_module(unit, True)
    try:
        yield
    finally:
        for unit in units:
            set_z3_leaf_module(unit, False)


def _forget_leaves(units: Iterable[torch.nn.Module]) -> None:
    """Removes DeepSpeed's mark on a leaf's parameters."""
    for unit in units:
        for p in unit.parameters():
            vars(p).pop("ds_z3_leaf_module", None)
