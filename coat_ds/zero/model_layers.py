"""What the block's `activations` make of the layers of a model.

Layers that are built for COAT, Megatron's, take other options by `take_activations(activations)`, have those
of now as `activations`, and `told_by` says who chose them, None if nobody did. Models without such layers are
converted (`coat_ds.layers`).
"""

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from coat_ds.config import ActivationsConfig, CoatConfigError, difference
from coat_ds.layers.conversion import conversion_of, holder_of
from coat_ds.layers.convert import convert_again, convert_silently, unconvert
from coat_ds.layers.parallel.autotp import is_autotp

# models that an engine has converted, and not the user
_of_engines: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def prepare_layers(
    model: nn.Module, activations: ActivationsConfig, said: bool, obstacle: str | None = None
) -> str:
    """Has the layers of `model` do what the block says, in place. Returns why linear layers that stay do.

    said: whether the block has a key `activations`. Without it, layers that were built or converted for COAT
        before keep their options; others are converted all the same.
    obstacle: why the DeepSpeed config keeps a model from being converted.
    Raises CoatConfigError for layers that somebody else told otherwise, if the block switches off layers that
    the script asked for, and for what cannot be converted; RuntimeError if somebody has put something else in
    the place of what an earlier engine converted.
    """
    built = [(name, m) for name, m in model.named_modules() if hasattr(m, "take_activations")]
    if built:
        _tell(built, activations, said)
        return "the model's own"
    holder = holder_of(model)
    if holder in _of_engines:
        # of another block, perhaps
        unconvert(holder)
        _of_engines.discard(holder)
        holder = None
    if holder is not None:
        _check_converted(conversion_of(holder).activations, activations, said)
        return "not there when the model was converted"
    if not activations.enabled:
        return "coat.activations.enabled is false"
    if obstacle is not None:
        if said:
            raise CoatConfigError(
                f'coat.activations.enabled: found True, but {obstacle}. Set "activations" to false.'
            )
        return obstacle
    try:
        convert_silently(model, activations)
    except ValueError as error:
        raise CoatConfigError(
            f'coat.activations.enabled: the model cannot be converted: {error} Or set "activations" to false.'
        ) from error
    if not conversion_of(model).found["linear"]:
        # of Megatron's own layers, say, norms alone
        unconvert(model)
        return "of a kind that is not converted"
    _of_engines.add(model)
    return "not there when the model was converted"


def take_exchanged(model: nn.Module) -> None:
    """Converts what AutoTP has put in the place of linear layers that an engine has converted."""
    if model in _of_engines and any(map(is_autotp, model.modules())):
        convert_again(model)


def check_adapters(model: nn.Module, tensor_parallel: Mapping[str, Any]) -> None:
    """Raises CoatConfigError where AutoTP would put linear layers in the place of PEFT's, without adapters.

    tensor_parallel: that section of the DeepSpeed config.
    """
    size = tensor_parallel.get("autotp_size", 0)
    adapted = [name for name, module in model.named_modules() if "base_layer" in module._modules]
    # whose patterns may leave out layers with adapters
    if size > 1 and adapted and "partition_config" not in tensor_parallel:
        raise CoatConfigError(
            f"tensor_parallel.autotp_size: found {size}, but the model has adapters of PEFT ({adapted[0]} "
            f"and {len(adapted) - 1} more), in whose place AutoTP puts linear layers without them. Drop the "
            "key, or merge the adapters (merge_and_unload)."
        )


def undo(model: nn.Module) -> None:
    """Gives back the layers of a model that an engine has converted.

    Raises RuntimeError if somebody has put something else in their place since.
    """
    if model in _of_engines:
        unconvert(model)
        _of_engines.discard(model)


def _tell(built: list[tuple[str, nn.Module]], activations: ActivationsConfig, said: bool) -> None:
    """Has layers that were built for COAT do what the block says."""
    if not activations.enabled:
        raise CoatConfigError(
            "coat.activations.enabled: found False, but the model was built of layers that compute in FP8 "
            f"({built[0][0]} and {len(built) - 1} more modules). Build it with sdpa_layer_spec in place of "
            "coat_layer_spec, or drop the key."
        )
    others = [(name, module) for name, module in built if said and module.activations != activations]
    for name, module in others:
        if module.told_by is not None:
            key, found, wanted = difference(module.activations, activations)
            raise CoatConfigError(
                f"coat.activations.{key}: found {wanted!r}, but {name} was built with {found!r}, as "
                f"{module.told_by} says. Make them equal, or drop one of the two."
            )
    # what a module holds is asked by those around it
    for _, module in reversed(others):
        module.take_activations(activations)


def _check_converted(found: ActivationsConfig, wanted: ActivationsConfig, said: bool) -> None:
    """Raises CoatConfigError if the script has converted its model otherwise than the block says."""
    if said and found != wanted:
        key, has, says = difference(found, wanted)
        raise CoatConfigError(
            f"coat.activations.{key}: found {says!r}, but the script has called coat_ds.convert with "
            f"{has!r}. Make them equal, or drop one of the two."
        )
