"""Reports what a DeepSpeed JSON would do to a model, on the meta device: nothing is allocated."""

from collections.abc import Mapping

import torch

from coat_ds.config import CoatConfig, CoatConfigError
from coat_ds.doctor.finding import OK, PROBLEM, UNKNOWN, WARNING, Finding
from coat_ds.plan import PlanError, from_deepspeed, from_module, predict
from coat_ds.plan.command import configured
from coat_ds.plan.systems import System

NAME = "dry run"
# share of a peak; a smaller saving is not worth a change of arithmetic
LEAST = 0.05


def check(config: Mapping, model: torch.nn.Module | None, gpus: int, sequence: int) -> list[Finding]:
    """Findings on the number of layers by format, the states' bytes a parameter, and the predicted peak.

    model: on the meta device; it is unchanged afterwards. None: only the block is checked. gpus, sequence: as
        in `coat_ds.plan.Layout`.
    """
    from coat_ds.layers.inventory import layers_of
    from coat_ds.optim.options import keeps_fp32
    from coat_ds.zero.block import asks_for_coat
    from coat_ds.zero.deepspeed_config import no_conversion
    from coat_ds.zero.model_layers import prepare_layers, undo

    if not asks_for_coat(config):
        return [
            Finding(
                NAME, WARNING, 'the JSON has no coat block: nothing changes. Add "coat": {"enabled": true}'
            )
        ]
    try:
        block = _read(config)
    except CoatConfigError as error:
        return [Finding(NAME, PROBLEM, str(error))]
    if not block.enabled:
        return [Finding(NAME, WARNING, "coat.enabled is false: nothing changes. Set it to true")]
    if model is None:
        return []
    # independent of the GPU: another check looks at this machine's
    obstacle = no_conversion(config, block.activations)
    try:
        why = prepare_layers(model, block.activations, "activations" in config.get("coat", {}), obstacle)
    except CoatConfigError as error:
        return [Finding(NAME, PROBLEM, str(error))]
    layers = layers_of(model, why)
    made, linears = layers.count("linear")
    details = {"made": layers.made, "found": layers.found, "left": layers.left}
    details["weights_left"] = layers.weights_left
    undo(model)
    out = []
    if block.activations.enabled and not made:
        text = f"FP8 saves nothing: none of {linears} linear layers would compute in it. {layers.summary()}"
        out.append(Finding("layers", PROBLEM, text, details))
    else:
        out.append(Finding("layers", OK, layers.summary(), details))
    out.append(_states(block, model, keeps_fp32))
    return [*out, _peak(config, model, gpus, sequence)]


def _read(config: Mapping) -> CoatConfig:
    """The block as DeepSpeed's engine would read it. Raises CoatConfigError as the engine does.

    A missing optimizer and "auto" among its parameters are accepted, since Hugging Face's Trainer fills them
    in.
    """
    from coat_ds.zero import deepspeed_config

    optimizer = config.get("optimizer", {"type": "AdamW"})
    if isinstance(optimizer, Mapping) and isinstance(params := optimizer.get("params"), Mapping):
        optimizer = {**optimizer, "params": {k: v for k, v in params.items() if v != "auto"}}
    return deepspeed_config.check({**config, "optimizer": optimizer}, None)


def _states(block: CoatConfig, model: torch.nn.Module, keeps_fp32) -> Finding:
    from coat_ds.plan.systems import FP32_MOMENTS, moment_bytes

    if not block.optimizer.enabled:
        return Finding(
            "states", WARNING, "coat.optimizer.enabled is false: moments stay FP32, 8 bytes a parameter"
        )
    options, kept, total = block.optimizer, 0, 0
    for name, p in model.named_parameters():
        total += p.numel()
        small = p.numel() < options.min_numel
        kept += p.numel() * (small or keeps_fp32(options.keep_fp32, name, p))
    mean = (moment_bytes(options) * (total - kept) + FP32_MOMENTS * kept) / total
    details = {"parameters": total, "kept_fp32": kept, "bytes_per_parameter": mean}
    text = f"{mean:.3f} bytes a parameter in place of 8; {kept:,} of {total:,} parameters keep FP32 moments"
    if mean > 0.5 * FP32_MOMENTS:
        return Finding("states", WARNING, f"{text}. Look at coat.optimizer.keep_fp32 and min_numel", details)
    return Finding("states", OK, text, details)


def _peak(config: Mapping, model: torch.nn.Module, gpus: int, sequence: int) -> Finding:
    try:
        sizes = from_module(model)
        layout = from_deepspeed(config, sizes, gpus=gpus, sequence=sequence)
        system = configured(config)
    except PlanError as error:
        return Finding("peak", UNKNOWN, f"cannot be predicted: {error}")
    before = predict(sizes, layout, System(name="BF16")).peak
    after = predict(sizes, layout, system).peak
    saved = 1 - after.total / before.total
    text = (
        f"predicted {before.total / 1e9:.1f} GB in BF16, {after.total / 1e9:.1f} GB with the block, on "
        f"{gpus} GPU{'s' * (gpus > 1)} with {layout.micro_batch} x {layout.sequence} tokens (more: coat plan)"
    )
    details = {"before_bytes": before.total, "after_bytes": after.total}
    if saved < LEAST:
        largest = max(
            ("weights", "masters", "gradients", "logits", "gathered", "buffers"),
            key=lambda r: getattr(after, r),
        )
        text += f". That saves next to nothing: most bytes are {largest}, which COAT does not shrink"
        return Finding("peak", WARNING, text, details)
    return Finding("peak", OK, text, details)
