"""Activations that save their input in 8 bits and do not save their output, alone and in gated feed-forward
layers.
"""

import torch

from coat_ds.config import ActivationsConfig
from coat_ds.layers.detection.probe import GatedForm
from coat_ds.layers.modules.converted_forward import ConvertedForward, converted_forward
from coat_ds.layers.modules.hooks import forget_if_hooked, forget_if_pre_hooked, has_user_hooks
from coat_ds.layers.modules.linear import Gemm, joined, may_merge, parameters_of
from coat_kernels.activation import ActivationOptions, activation
from coat_kernels.autograd.origin import origin_of
from coat_kernels.linear import LinearOptions


class Fp8Activation(ConvertedForward):
    """The forward of an elementwise `function`, one of `coat_kernels.activation.KINDS`."""

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig, function: str):
        super().__init__(module, activations)
        self.options = ActivationOptions(function, False, self.saved_format)

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        if not self.check_tensor(input):
            return self.stock(input)
        dtype = self.dtype_of_output(input)
        y = activation(input.to(dtype), self.options)
        forget_if_hooked(self.module, y)
        return y


class Fp8GatedFeedForward(ConvertedForward):
    """The forward of down(a(gate(x)) * up(x)). Gate and up are one GEMM if no adapter or hook would be
    skipped; otherwise their modules are called. If a has a hook or was replaced, the stock forward runs."""

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig, form: GatedForm):
        super().__init__(module, activations)
        self.form, self.options = form, ActivationOptions(form.kind, True, self.saved_format)
        named = form.gate, form.up, form.down
        # the activation, if it is a module, and dropout modules with rate 0
        self.between = {name: child for name, child in module._modules.items() if name not in named}
        self.within = [m for child in self.between.values() if child is not None for m in child.modules()]
        self.gate_up = None if form.up is None else Gemm(activations)

    @property
    def linears(self) -> tuple[torch.nn.Module, ...]:
        """The linear layers that read the input."""
        form, modules = self.form, self.module._modules
        return tuple(modules[name] for name in (form.gate, form.up) if name is not None)

    @property
    def down(self) -> torch.nn.Module:
        return self.module._modules[self.form.down]

    def calls_between(self) -> bool:
        """Whether a module between the GEMMs has a hook, was replaced, or has a dropout rate above 0 by
        now."""
        modules = self.module._modules
        for name, child in self.between.items():
            if modules.get(name) is not child:
                return True
        return any(has_user_hooks(m) or (m.training and getattr(m, "p", 0)) for m in self.within)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if not self.check_tensor(x) or self.calls_between():
            return self.stock(x)
        forget_if_pre_hooked(self.module, x)
        return self.down(activation(self._gate_up(x), self.options))

    def gate_up_options(self) -> LinearOptions:
        """The options of the GEMM that reads the input, for a fused block."""
        weights, _ = parameters_of(self.linears)
        return (self.gate_up or converted_forward(self.linears[0])).options(joined(weights))

    def _gate_up(self, x: torch.Tensor) -> torch.Tensor:
        """gate(x) | up(x)."""
        linears = self.linears
        if self.gate_up is None:
            return linears[0](x)
        if not may_merge(linears):
            return torch.cat([linear(x) for linear in linears], -1)
        return self.gate_up.multiply(x, *map(joined, parameters_of(linears)), origin_of(x))
