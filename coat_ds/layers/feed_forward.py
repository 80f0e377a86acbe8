"""Activations that keep their input in 8 bits and their output not at all, by themselves and in gated
feed-forward layers.
"""

import torch

from coat_ds.config import ActivationsConfig
from coat_ds.layers.formats import formats
from coat_ds.layers.hooks import after_pre_hooks, before_hooks
from coat_ds.layers.probe import GatedForm
from coat_ds.layers.replaced import Replaced
from coat_kernels.activation import activation
from coat_kernels.deferred import PredictedScale


class _Activation(Replaced):
    kind = "feed_forward"

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig):
        super().__init__(module)
        self.kept = {"group_size": activations.group_size, "saved_format": activations.saved_format}
        chosen = formats(activations)
        self.y_scale, self.grad_scale = PredictedScale(chosen.forward), PredictedScale(chosen.backward)

    def activate(self, x: torch.Tensor, function: str, gated: bool) -> torch.Tensor:
        """What an activation makes of `x`. Output and gradient wait for FP8 products as long as nobody else
        reads them."""
        scales = {"y_scale": self.y_scale, "grad_scale": self.grad_scale}
        scales = {name: None if scale.times_made else scale for name, scale in scales.items()}
        return activation(x, function, gated=gated, **self.kept, **scales)


class Fp8Activation(_Activation):
    """The forward of an elementwise `function`, one of `coat_kernels.activation.KINDS`."""

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig, function: str):
        super().__init__(module, activations)
        self.function = function

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if not self.takes(input) or input.numel() == 0:
            return self.stock(input)
        dtype = self.dtype_of_output(input)
        y = self.activate(input if dtype == input.dtype else input.to(dtype), self.function, gated=False)
        before_hooks(self.module, y)
        return y


class Fp8GatedFeedForward(_Activation):
    """The forward of down(a(gate(x)) * up(x)), over the modules that are there: adapters and hooks stay."""

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig, form: GatedForm):
        super().__init__(module, activations)
        self.form = form

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        form, modules = self.form, self.module._modules
        if not self.takes(x) or x.numel() == 0:
            return self.stock(x)
        after_pre_hooks(self.module, x)
        both = modules[form.gate](x)
        if form.up is not None:
            both = torch.cat((both, modules[form.up](x)), -1)
        return modules[form.down](self.activate(both, form.kind, gated=True))
