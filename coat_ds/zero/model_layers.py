"""How the block's `activations` configure the layers of a model.

Layers that are built for COAT (Megatron's) have their present options as `activations` and take others by
`apply_activations(activations)`. Their `activations_source` names their source, None for defaults.
Models without such layers are converted (`coat_ds.layers`).
"""

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from coat_ds.config import ActivationsConfig, CoatConfigError, difference
from coat_ds.layers.conversion import conversion_of, holder_of
from coat_ds.layers.convert import convert_without_log, reconvert, unconvert
from coat_ds.layers.parallel.autoep import is_autoep
from coat_ds.layers.parallel.autotp import is_autotp

# models that were converted by an engine and not by the user
_of_engines: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def prepare_layers(
    model: nn.Module, activations: ActivationsConfig, given: bool, obstacle: str | None = None
) -> str:
    """Configures the layers of `model` by the block, in place. Returns why unconverted linear layers stay.

    given: whether the block has a key `activations`. Without it, layers that were built or converted for COAT
        before keep their options; other layers are converted all the same.
    obstacle: why the DeepSpeed config prevents a conversion; None if it does not.
    Raises CoatConfigError for layers with other options from another source, if the block switches off layers
    that the script built in FP8, and for a model that cannot be converted. Raises RuntimeError if the layers
    that an earlier engine converted were replaced since.
    """
    built = [(name, m) for name, m in model.named_modules() if hasattr(m, "apply_activations")]
    if built:
        _set_activations(built, activations, given)
        return "the model's own"
    holder = holder_of(model)
    if holder in _of_engines:
        # perhaps by an engine with another block
        unconvert(holder)
        _of_engines.discard(holder)
        holder = None
    if holder is not None:
        found = conversion_of(holder).activations
        if given and found != activations:
            key, has, says = difference(found, activations)
            raise CoatConfigError(
                f"coat.activations.{key}: found {says!r}, but the script has called coat_ds.convert with "
                f"{has!r}. Make them equal, or drop one of the two."
            )
        return "not there when the model was converted"
    if not activations.enabled:
        return "coat.activations.enabled is false"
    if obstacle is not None:
        if given:
            raise CoatConfigError(
                f'coat.activations.enabled: found True, but {obstacle}. Set "activations" to false.'
            )
        return obstacle
    try:
        convert_without_log(model, activations)
    except ValueError as error:
        raise CoatConfigError(
            f'coat.activations.enabled: the model cannot be converted: {error} Or set "activations" to false.'
        ) from error
    if not conversion_of(model).found["linear"]:
        # for example only the norms of Megatron's own layers
        unconvert(model)
        return "of a kind that is not converted"
    _of_engines.add(model)
    return "not there when the model was converted"


def convert_replaced(model: nn.Module) -> None:
    """Converts AutoTP's and AutoEP's layers if they have replaced layers that an engine has converted."""
    if model in _of_engines and any(is_autotp(m) or is_autoep(m) for m in model.modules()):
        reconvert(model)


def check_adapters(model: nn.Module, tensor_parallel: Mapping[str, Any]) -> None:
    """Raises CoatConfigError if AutoTP would replace PEFT's layers by linear layers without adapters.

    tensor_parallel: that section of the DeepSpeed config.
    """
    size = tensor_parallel.get("autotp_size", 0)
    adapted = [name for name, module in model.named_modules() if "base_layer" in module._modules]
    # the patterns of partition_config may leave out layers with adapters
    if size > 1 and adapted and "partition_config" not in tensor_parallel:
        raise CoatConfigError(
            f"tensor_parallel.autotp_size: found {size}, but the model has adapters of PEFT ({adapted[0]} "
            f"and {len(adapted) - 1} more), in whose place AutoTP puts linear layers without them. Drop the "
            "key, or merge the adapters (merge_and_unload)."
        )


def restore_layers(model: nn.Module) -> None:
    """Restores the stock layers of a model that an engine has converted.

    Raises RuntimeError if the converted layers were replaced since.
    """
    if model in _of_engines:
        unconvert(model)
        _of_engines.discard(model)


def _set_activations(built: list[tuple[str, nn.Module]], activations: ActivationsConfig, given: bool) -> None:
    if not activations.enabled:
        raise CoatConfigError(
            "coat.activations.enabled: found False, but the model was built of layers that compute in FP8 "
            f"({built[0][0]} and {len(built) - 1} more modules). Build it with sdpa_layer_spec in place of "
            "coat_layer_spec, or drop the key."
        )
    others = [(name, module) for name, module in built if given and module.activations != activations]
    for name, module in others:
        if module.activations_source is not None:
            key, found, wanted = difference(module.activations, activations)
            raise CoatConfigError(
                f"coat.activations.{key}: found {wanted!r}, but {name} was built with {found!r}, as "
                f"{module.activations_source} says. Make them equal, or drop one of the two."
            )
    # inner modules first: outer modules read their options
    for _, module in reversed(others):
        module.apply_activations(activations)
