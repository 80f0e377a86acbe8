"""`--spec megatron_ext.spec coat_layer_spec`; for the hybrid stack `coat_hybrid_stack_spec`.

The block in the file that the variable `COAT_CONFIG` names decides what is on. Without the variable the
block has its defaults.

    activations.enabled             FP8 layers (default), else Megatron's own layers on SDPA
    optimizer.enabled               8-bit states in Megatron's optimizers (default)
    fp8_activation_checkpointing    FP8 inputs of what Megatron recomputes (off by default)

Importing this module installs the optimizer and the recompute: a pipeline stage may have no layer.
"""

from dataclasses import replace

from coat_ds.log import log_once

# first: they raise RuntimeError where megatron-core is missing or has another version
from megatron_ext import hybrid_specs, layer_specs, options
from megatron_ext.layers import recompute
from megatron_ext.optimizer import patches

_config = options.coat_config()
if _config.activations.enabled:
    _settings = {"activations": _config.activations, "source": options.named_file()}
    coat_layer_spec = replace(layer_specs.coat_layer_spec, params=_settings)
    coat_hybrid_stack_spec = hybrid_specs.stack_spec(layer_specs.coat_parts, **_settings)
else:
    coat_layer_spec = layer_specs.sdpa_layer_spec
    coat_hybrid_stack_spec = hybrid_specs.sdpa_hybrid_stack_spec
if _config.optimizer.enabled:
    patches.install(_config)
else:
    patches.watch(_config)
if _config.fp8_activation_checkpointing:
    recompute.install()
log_once(options.what_is_on(_config))
