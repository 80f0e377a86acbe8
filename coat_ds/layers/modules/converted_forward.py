"""The base class of the objects that convert assigns to a module's attribute `forward`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from coat_ds.config import ActivationsConfig
from coat_ds.log import log_once
from coat_ds.optim.shards import is_distributed

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# what the kernels read and write
DTYPES = (torch.bfloat16, torch.float32)


class ConvertedForward:
    """Computes what a module's stock forward computes, in FP8. It holds no parameters and no other state of
    the model.

    It can be copied and pickled with its module: it holds no functions and nothing of the process.
    """

    compute: Callable[..., Any]
    """The forward that replaces the module's."""

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig):
        self.module = module
        self.evaluates_stock = activations.evaluation == "stock"
        # an earlier patch of this instance's forward, if there was one
        self.before = module.__dict__.get("forward")
        self.saved_format = activations.saved_format
        self._dtypes: dict[tuple, torch.dtype] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.evaluates_stock and is_evaluated(self.module):
            return self.stock(*args, **kwargs)
        return self.compute(*args, **kwargs)

    def install(self) -> None:
        self.module.forward = self
        # shown by print(model)
        self.module.extra_repr = self.extra_repr

    def extra_repr(self) -> str:
        stock = type(self.module).extra_repr(self.module)
        return ", ".join(filter(None, (stock, self.shown())))

    def shown(self) -> str:
        """The text that print(model) adds."""
        return "coat=8-bit saved"

    def remove(self) -> None:
        self.module.__dict__.pop("extra_repr", None)
        if self.before is None:
            del self.module.forward
        else:
            self.module.forward = self.before

    def stock(self, *args, **kwargs) -> Any:
        """The module's forward before it was converted."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def check_tensor(self, x: torch.Tensor) -> bool:
        """Checks an input or a weight, after autocast. Returns whether the kernels take it. Raises TypeError
        for FP16, and logs once that layers compute as before for other unsupported types. It logs nothing for
        tensors on "meta", which only propagate shapes, nor for DTensors, which the caller handles."""
        if x.is_meta:
            return False
        dtype = autocast_dtype(x) or x.dtype
        if torch.float16 in (dtype, x.dtype):
            raise TypeError(
                f"{type(self.module).__name__}: converted layers compute in BF16 or FP32, found FP16. Train "
                "in BF16 (model.bfloat16(), or autocast to torch.bfloat16), or call coat_ds.unconvert(model)."
            )
        if can_be_read(x):
            return True
        if not is_distributed(x):
            what, found, call = "in BF16 or FP32", x.dtype, "model.bfloat16() or model.float(), or "
            if not is_plain(x):
                what, found, call = "with plain tensors", type(x).__name__, ""
            log_once(
                f"converted layers compute {what}, found {found}: they compute as before they were "
                f"converted, not in FP8. Call {call}coat_ds.unconvert(model)."
            )
        return False

    def dtype_of_output(self, x: torch.Tensor) -> torch.dtype:
        """The dtype of the stock module's output [..., n] for an input like `x` [..., n]. It is found by
        running the stock module once for each combination of dtypes, since autocast and mixed dtypes have
        rules for each operation."""
        weight = getattr(self.module, "weight", None)
        key = x.dtype, autocast_dtype(x), None if weight is None else weight.dtype
        found = self._dtypes.get(key)
        if found is None:
            with torch.no_grad():
                if is_distributed(x):
                    row = x.new_zeros(1, x.shape[-1])
                else:
                    row = torch.zeros(1, x.shape[-1], dtype=x.dtype, device=x.device)
                found = self._dtypes[key] = self.stock(row).dtype
        return found


def is_evaluated(module: torch.nn.Module) -> bool:
    """Whether a forward of `module` is now an evaluation: it is not in training mode and grad mode is off. In
    training mode, a forward without gradients may be that of a checkpoint, which is recomputed later."""
    return not (module.training or torch.is_grad_enabled())


def is_plain(x: torch.Tensor) -> bool:
    """Whether `x` has memory that kernels can read. A DTensor of tensor parallelism has none."""
    return type(x) in _PLAIN


def can_be_read(x: torch.Tensor) -> bool:
    """Whether kernels can read `x`: it is plain, not on "meta", and of a supported dtype."""
    return x.dtype in DTYPES and type(x) in _PLAIN and not x.is_meta


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The current autocast dtype on the device of `x`; None if autocast is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


# attributes of every module
_OF_ANY_MODULE = frozenset(vars(torch.nn.Module()))


def attributes_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values of the attributes of a module and of its replaced forward, except the attributes of
    every module."""
    for holder in (module, converted_forward(module)):
        if holder is not None:
            yield from (item for item in vars(holder).items() if item[0] not in _OF_ANY_MODULE)


def converted_forward(module: torch.nn.Module) -> ConvertedForward | None:
    """The `ConvertedForward` in the module's `forward`; None if there is none."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, ConvertedForward) else None
