"""The model that is trained, its groups of parameters and their learning rate."""

import argparse
import dataclasses
import math

import torch

from coat_launch.args import SHAPE_FLAGS
from coat_launch.data import padded_vocab_size
from coat_launch.errors import LaunchError


def load_model_shape(args: argparse.Namespace):
    from megatron_ext.model import load_shape

    given = {flag: value for flag in SHAPE_FLAGS if (value := getattr(args, flag)) is not None}
    try:
        return dataclasses.replace(load_shape(args.model_config), **given)
    except ValueError as error:
        raise LaunchError(f"--model-config, or an option in place of its value: {error}") from error


def build_model(args: argparse.Namespace, shape, coat, vocab_size: int) -> torch.nn.Module:
    """A GPTModel of megatron-core with COAT's layers, or with Megatron's own if COAT's layers are disabled.

    shape, coat: a `megatron_ext.model.ModelShape` and a `coat_ds.CoatConfig`.
    Raises LaunchError for a shape that cannot be built.
    """
    from megatron_ext import layer_specs
    from megatron_ext.model import build_gpt

    fp8_layers = coat.enabled and coat.activations.enabled
    try:
        model = build_gpt(
            shape,
            layer_specs.coat_layer_spec if fp8_layers else layer_specs.sdpa_layer_spec,
            seq_length=args.seq_length,
            vocab_size=padded_vocab_size(vocab_size),
            seed=args.seed,
            activations=coat.activations,
        )
    except ValueError as error:
        raise LaunchError(str(error)) from error
    model.register_state_dict_post_hook(_drop_empty)
    return model


def _drop_empty(module, state: dict, prefix, metadata) -> None:
    """Keeps None, Megatron's extra state of a layer without extra state, out of checkpoints: DeepSpeed's
    conversion to universal checkpoints treats it as a tensor. Megatron adds it on load if missing."""
    for name in [name for name, value in state.items() if value is None]:
        del state[name]


def parameter_groups(model: torch.nn.Module) -> list[dict]:
    """Weight decay for matrices only, as usual for GPTs."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def warmup_cosine(step: int, *, warmup: int, total: int) -> float:
    """Factor of the peak learning rate: linear to 1, then half a cosine down to 0.1."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup)))
