"""Engines whose checkpoints are written and read: a model with given gradients, and what its states are."""

import argparse
import logging

import deepspeed
import torch
from torch import nn

from tests.coat_ds.cells import ds_config
from tests.util import listening

# the paper's second moment, and today's: the first one's format follows
OLD, NEW = "fp8_expanded", "log8"


class Given(nn.Module):
    """The gradients of its parameters are given: the same at any number of ranks, to the bit."""

    def __init__(self):
        super().__init__()
        shapes = [(37, 131), (13,), (61, 47), (131, 61), (1500,), (5, 1000)]
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)
        return sum((w * torch.randn(w.shape, generator=generator)).sum() for w in self.weights)


def start(run, coat=True, universal=False, layout="stock", second=OLD):
    torch.manual_seed(0)
    model = run["model"]()
    groups = run["groups"] and run["groups"](model)
    config = ds_config(run, coat)
    if coat:
        config["coat"]["optimizer"] |= {"checkpoint_layout": layout, "exp_avg_sq_format": second}
    config["checkpoint"] = {"load_universal": universal}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return engine


def full_states(engine):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return [
        (
            safe_get_full_fp32_param(p).clone(),
            *(safe_get_full_optimizer_state(p, name).clone() for name in ("exp_avg", "exp_avg_sq")),
        )
        for p in engine.module.parameters()
        if p.requires_grad
    ]


def to_universal(folder, tag):
    from deepspeed.checkpoint.ds_to_universal import main

    if torch.distributed.get_rank() == 0:
        main(
            argparse.Namespace(
                input_folder=f"{folder}/{tag}",
                output_folder=f"{folder}/{tag}_universal",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    torch.distributed.barrier()


def of_moments():
    """Lines on the moments of a checkpoint."""
    return listening(logging.INFO, "moments of the checkpoint")
