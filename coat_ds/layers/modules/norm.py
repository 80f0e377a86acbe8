"""The forward of a converted norm: RMSNorm and LayerNorm that save their input in 8 bits."""

import sys

import torch

from coat_ds.config import ActivationsConfig
from coat_ds.layers.detection.probe import NormForm
from coat_ds.layers.modules import dtensor
from coat_ds.layers.modules.converted_forward import DTYPES, ConvertedForward, is_plain
from coat_ds.layers.modules.hooks import forget_if_hooked
from coat_ds.optim.shards import is_distributed
from coat_kernels.norm import NormOptions, normalize


class Fp8Norm(ConvertedForward):
    """The forward of a norm of the given `form`."""

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig, form: NormForm):
        super().__init__(module, activations)
        self.options = NormOptions(form.eps, form.layer_norm, form.zero_centered, self.saved_format)

    def compute(self, hidden_states: torch.Tensor) -> torch.Tensor:
        module, takes = self.module, self.check_tensor(hidden_states)
        weight, bias = module.weight, module._parameters.get("bias")
        if not (takes and is_plain(weight)):
            y = None
            if is_distributed(hidden_states) and hidden_states.dtype in DTYPES:
                # the output's dtype is that of the following all-gather
                dtype = self.dtype_of_output(hidden_states)
                y = dtensor.norm(hidden_states, weight, bias, norm=lambda *ts: self._norm(*ts, dtype))
            return self.stock(hidden_states) if y is None else y
        y = self._norm(hidden_states, weight, bias, self.dtype_of_output(hidden_states))
        forget_if_hooked(module, y)
        return y

    def _norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """x [..., n] -> [..., n] in `dtype`."""
        if dtype != x.dtype:
            # the wider of the two dtypes is at least as precise as the stock module
            x = x.to(torch.promote_types(dtype, x.dtype))
        # imported if there is an FSDP2 unit
        api = sys.modules.get("torch.distributed.fsdp")
        if api is not None and isinstance(self.module, api.FSDPModule):
            # FSDP2 frees the weights after this forward, and later readers of y recompute it from them
            weight, bias = weight.clone(), None if bias is None else bias.clone()
        y = normalize(x, weight, bias if self.options.layer_norm else None, self.options)
        return y if y.dtype == dtype else y.to(dtype)
