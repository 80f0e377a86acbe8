"""Converted base layers of adapters that no forward calls."""

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from coat_ds.layers.modules.linear import Fp8Linear
from coat_ds.layers.modules.replaced import replaced
from coat_ds.saved_bytes import around_first_forward

# how many names of modules the line shows
NAMED = 3


def report_uncalled(model: nn.Module, say: Callable[[str], None]) -> None:
    """Calls `say`, after the first forward pass of `model` with gradients, with the converted base layers of
    adapters that the pass did not call, if there are any.

    Kernels for adapters, such as Axolotl's, replace the forward of outer layers and multiply by the base
    weights themselves. Layers without adapters are not checked, because fused blocks do not call them either.
    """
    beneath = {
        name: module
        for name, module in model.named_modules()
        if name.endswith(".base_layer") and type(replaced(module)) is Fp8Linear
    }

    @contextlib.contextmanager
    def looking() -> Iterator[None]:
        called: set[nn.Module] = set()
        handles = [m.register_forward_pre_hook(lambda m, _: called.add(m)) for m in beneath.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if names := [name for name, module in beneath.items() if module not in called]:
            listed = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
            say(
                f"the first forward called {len(beneath) - len(names)} of {len(beneath)} converted "
                f"linear layers with adapters. Others do not multiply in FP8 ({listed}): kernels that take "
                "the place of adapters may do it for them. With Axolotl set lora_mlp_kernel, lora_qkv_kernel "
                "and lora_o_kernel to false."
            )

    if beneath:
        around_first_forward(model, looking)
