"""Models that transformers loads in parts (`tp_plan`), converted, in two processes."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import coat_ds
from tests.coat_ds.layers.measures import fp8_bound, relative, run
from tests.coat_ds.layers.parts import whole
from tests.families import FAMILIES
from tests.util import on_gpus, run_distributed

tensor_parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
LLAMA = FAMILIES["llama"]


def start(device):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}


def load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, tp_plan="auto").train()


def llama(path, device):
    """Loss and gradients of the model alone, in parts, and in parts converted; what is left and the losses of
    a pass without gradients and of reentrant checkpoints; evaluated as a stock model, and by one."""
    start(device)
    batch = {name: value.to(device) for name, value in LLAMA.batch().items()}
    found = [run(LLAMA.build().to(device), batch)]
    for converts in (False, True):
        model = load(path)
        if converts:
            coat_ds.convert(model)
        loss, gradients = run(model, batch)
        found.append((loss, whole(gradients)))
    with torch.no_grad():
        evaluated = model(**batch).loss.item()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    again = run(model, batch)
    coat_ds.unconvert(model)
    stock = run(model, batch)
    losses = []
    for activations in ({"evaluation": "stock"}, {"enabled": False}):
        with torch.no_grad():
            losses.append(coat_ds.convert(model, activations).eval()(**batch).loss.item())
        coat_ds.unconvert(model)
    return (
        found,
        coat_ds.conversion_of(coat_ds.convert(model)),
        evaluated,
        (again[0], whole(again[1])),
        stock[0],
        losses,
    )


def check(ranks, exact):
    for found, conversion, evaluated, again, stock, (plain, unconverted) in ranks:
        assert plain == unconverted
        (loss, expected), (bf16, _), (fp8, gradients) = found
        assert len(conversion.converted["linear"]) == 14 and not conversion.converted["layer"]
        assert bf16 == stock != fp8 and abs(fp8 - loss) < 2**-8 * loss
        assert 2**-6 < relative(gradients, expected) < fp8_bound(14)
        # without gradients transformers multiplies plain parts, which are the same
        assert evaluated == fp8 == again[0]
        # attention's gradients need not be the same bits twice on GPUs
        assert relative(again[1], gradients) <= (0 if exact else 2**-8)


def test_transformers_tp_model_in_two_parts(tmp_path):
    LLAMA.build().save_pretrained(tmp_path)
    check(run_distributed(llama, 2, str(tmp_path), "cpu"), exact=True)


@on_gpus(2)
def test_transformers_tp_model_on_two_gpus(tmp_path):
    LLAMA.build().save_pretrained(tmp_path)
    check(run_distributed(llama, 2, str(tmp_path), "cuda", gpus=True), exact=False)


def layers():
    """Why layers stay that are split otherwise, or in parts of other sizes."""
    dist.init_process_group("gloo")
    mesh, left = init_device_mesh("cpu", (2,)), []
    for style, outputs in ((tensor_parallel.AllReduceParallel, 64), (tensor_parallel.ColwiseParallel, 48)):
        layer, plan = nn.Linear(64, outputs, bias=False), style()
        plan.shard_param(layer, "weight", mesh)
        net = nn.Sequential(plan.install_forward(layer.bfloat16(), mesh))
        left.append(coat_ds.conversion_of(coat_ds.convert(net)).left)
    return left


def test_transformers_tp_layers_that_stay():
    for other, small in run_distributed(layers, 2):
        assert other == {"0": "transformers' AllReduceParallel keeps its forward"}
        assert small == {"0": "a rank's part is 24 x 64, not multiples of 16"}
