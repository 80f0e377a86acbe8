"""Converted models under torch's DistributedDataParallel, which Trainer takes without DeepSpeed."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import coat_ds
from tests.families import FAMILIES
from tests.util import run_distributed

LLAMA, STEPS = FAMILIES["llama"], 2
OPTIONS = {
    "plain": {},
    "gradients are views": {"gradient_as_bucket_view": True},
    "unused parameters are looked for": {"find_unused_parameters": True},
    "a static graph": {"static_graph": True},
}
KINDS = {"default": {}, "cached": {"weight_cache": "fp8"}, "recomputed": {"attention_format": "recompute"}}


def train(model, batches_of) -> list[torch.Tensor]:
    """Weights after each step; the gradient is the mean over its batches."""
    optimizer, found = coat_ds.CoatAdamW(model.parameters(), lr=1e-3, min_numel=100), []
    for step in range(STEPS):
        batches = batches_of(step)
        for batch in batches:
            # halves are exact, in BF16 and in FP8
            (model(**batch).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [p.detach().clone() for p in model.parameters()]
    return found


def weights():
    """For each kind of layers those of one process, and of this rank for each way to be data parallel."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank, out = dist.get_rank(), {}
    for kind, activations in KINDS.items():
        alone = coat_ds.convert(LLAMA.build(), activations)
        out[kind] = {"alone": train(alone, lambda step: [LLAMA.batch(2 * step + half) for half in range(2)])}
        for name, options in OPTIONS.items() if kind == "default" else [("plain", {})]:
            model = DistributedDataParallel(coat_ds.convert(LLAMA.build(), activations), **options)
            out[kind][name] = train(model, lambda step: [LLAMA.batch(2 * step + rank)])
    return out


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(weights, 2)


def test_ddp_ranks_train_as_one_process(ranks):
    for found in ranks:
        for kind, ways in found.items():
            for name, trained in ways.items():
                assert all(map(torch.equal, trained, ways["alone"])), (kind, name)
