"""A model of transformers on the meta device: nothing is allocated."""

import textwrap
from collections.abc import Mapping

import torch
from torch.utils import _device

from coat_ds.plan.errors import PlanError


def build(config: Mapping) -> torch.nn.Module:
    """The model of a Hugging Face config, on the meta device, in BF16: of the class that its `architectures`
    name, or a causal language model.

    Raises PlanError where transformers is missing or does not know it.
    """
    try:
        import transformers
    except ImportError as error:
        raise PlanError(
            "model: transformers, which builds it, is not installed. pip install transformers"
        ) from error
    fields = dict(config)
    try:
        made = transformers.AutoConfig.for_model(fields.pop("model_type", ""), **fields)
        kind = next(
            (k for name in made.architectures or () if (k := getattr(transformers, name, None))), None
        )
        # torch keeps the list of constructors that it made when it first needed one. If DeepSpeed's zero.Init
        # had exchanged them then, the list lacks torch's own, and the model would take its memory
        _device._device_constructors.cache_clear()
        with torch.device("meta"):
            model = kind(made) if kind else transformers.AutoModelForCausalLM.from_config(made)
    # whatever the classes of a foreign config raise
    except Exception as error:
        why = textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
        fix = "Correct model_type, or what it names"
        if "auto_map" in config:
            why = "its code is not part of transformers: auto_map"
            fix = "Build it in Python on the meta device, and call coat_ds.plan.from_module"
        raise PlanError(f"model: transformers cannot build it ({why}). {fix}.") from error
    # buffers that torch's constructors did not make, too
    return model.to("meta", torch.bfloat16)
