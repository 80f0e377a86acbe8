"""The GPU memory that checkpoints take in addition to what training holds."""

import argparse
import copy
import io

import deepspeed
import pytest
import torch
from torch import nn

import coat_ds
from coat_ds.optim.options import MOMENTS
from coat_ds.optim.saving import decoding_on_save
from tests.coat_ds.cells import cell, ds_config
from tests.util import run_distributed

NUMEL = 2**25
# of a moment in FP32: a part is a 64th of it, and two of ZeRO-3's parts an eighth
SMALL = 0.3
# both moments, which a load makes while the old ones may still be there
STATES = 0.53

pytestmark = pytest.mark.gpu


def grown(act) -> float:
    """What is allocated at most while `act` runs, over FP32 of all parameters."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    act()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (4 * NUMEL)


def in_parts(patch):
    for name in ("coat_kernels.codecs.codec.AT_ONCE", "coat_ds.optim.moment.AT_ONCE"):
        patch.setattr(name, NUMEL // 64)


def saved_by(optimizer):
    with decoding_on_save():
        torch.save(optimizer.state_dict(), io.BytesIO())


def test_gpu_memory_of_moments_of_one_large_tensor(monkeypatch):
    in_parts(monkeypatch)
    p = nn.Parameter(torch.randn(NUMEL, device="cuda"))
    p.grad = torch.randn_like(p)
    optimizer = coat_ds.CoatAdamW([p])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    x = torch.rand(NUMEL)
    del p.grad
    found = {
        "state_dict": grown(optimizer.state_dict),
        "save": grown(lambda: saved_by(optimizer)),
        "load": grown(lambda: optimizer.load_state_dict(saved)),
        **{name: grown(lambda name=name: optimizer.state[p][name].copy_(x)) for name in MOMENTS},
    }
    assert found.pop("load") < STATES + SMALL
    assert max(found.values()) < SMALL, found


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(1024, NUMEL // 2**14)) for _ in range(16))

    def forward(self, x):
        return sum((x @ w).square().mean() for w in self.weights)


def engine_of(stage, universal=False):
    zero = {"sub_group_size": NUMEL // 16} if stage == 3 else {}
    config = ds_config(cell(stage, model=Given, zero=zero))
    # in stage 0, files with a master for each parameter
    config["optimizer"]["params"]["torch_adam"] = True
    config["checkpoint"] = {"load_universal": universal}
    return deepspeed.initialize(model=Given(), config=config)[0]


def checkpoints(stage, folder):
    out = {}
    with pytest.MonkeyPatch.context() as patch:
        in_parts(patch)
        engine = engine_of(stage)
        x = torch.ones(1, 1024, device=engine.device, dtype=torch.bfloat16)
        out["backward"] = grown(lambda: engine.backward(engine(x)))
        out["step"] = grown(engine.step)
        out["save"] = grown(lambda: engine.save_checkpoint(folder, tag="a"))
        out["load"] = grown(lambda: engine.load_checkpoint(folder, tag="a"))
        if stage:
            from deepspeed.checkpoint.ds_to_universal import main

            arguments = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
            arguments |= {"strict": True, "inject_missing_state": True}
            folders = {"input_folder": f"{folder}/a", "output_folder": f"{folder}/b"}
            main(argparse.Namespace(**folders, **arguments))
            engine.destroy()
            engine = engine_of(stage, universal=True)
            out["universal"] = grown(lambda: engine.load_checkpoint(folder, tag="b"))
    return out


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gpu_memory_of_checkpoints_of_engines(stage, tmp_path):
    (found,) = run_distributed(checkpoints, 1, stage, str(tmp_path), gpus=True)
    assert found["save"] < SMALL, found
    # a step needs more
    assert max(found["load"], found.get("universal", 0)) < STATES + SMALL, found
