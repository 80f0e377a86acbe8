"""Reports what a DeepSpeed JSON would do to the layers of a model, on the meta device: nothing is allocated.
`coat plan` predicts the memory."""

from collections.abc import Mapping

import torch

from coat_ds.config import CoatConfigError
from coat_ds.doctor import OK, PROBLEM, WARNING, Finding

NAME = "dry run"


def check(config: Mapping, model: torch.nn.Module | None) -> list[Finding]:
    """Findings on the JSON, and on the number of layers by format.

    model: on the meta device; it is unchanged afterwards. None: only the block is checked.
    """
    from coat_ds.layers.inventory import layers_of
    from coat_ds.zero.block import asks_for_coat
    from coat_ds.zero.deepspeed_config import check_completed, fp32_warning, why_no_conversion
    from coat_ds.zero.model_layers import prepare_layers, restore_layers

    if not asks_for_coat(config):
        return [
            Finding(
                NAME, WARNING, 'the JSON has no coat block: nothing changes. Add "coat": {"enabled": true}'
            )
        ]
    try:
        block = check_completed(config)
    except CoatConfigError as error:
        return [Finding(NAME, PROBLEM, str(error))]
    if not block.enabled:
        return [Finding(NAME, WARNING, "coat.enabled is false: nothing changes. Set it to true")]
    findings = [Finding(NAME, WARNING, line)] if (line := fp32_warning(config, block)) else []
    if model is None:
        return findings
    # independent of the GPU: another check looks at this machine's
    obstacle = why_no_conversion(config)
    try:
        why = prepare_layers(model, block.activations, "activations" in config.get("coat", {}), obstacle)
    except CoatConfigError as error:
        return [Finding(NAME, PROBLEM, str(error))]
    layers = layers_of(model, why)
    made, linears = layers.count("linear")
    details = {"made": layers.made, "found": layers.found, "left": layers.left}
    details["weights_left"] = layers.weights_left
    restore_layers(model)
    if block.activations.enabled and not made:
        text = f"FP8 saves nothing: none of {linears} linear layers would compute in it. {layers.summary()}"
        return [*findings, Finding("layers", PROBLEM, text, details)]
    return [*findings, Finding("layers", OK, layers.summary(), details)]
