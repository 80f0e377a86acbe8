"""`coat plan`: gradients in FP32, and where gradients leave room for graphs of larger layers."""

import contextlib
from importlib.metadata import version

import deepspeed
import pytest
import torch
from packaging.version import Version

from coat_ds.plan import PlanError, all_systems, from_deepspeed, predict
from coat_kernels.graphs import gradient_moves_in_backward, max_graphed_work
from tests.coat_ds.engines import STATES, config_of
from tests.coat_ds.planned import MATRICES, SMALL, moments
from tests.util import run_distributed


@pytest.mark.parametrize("name", ["fp32", "float32", "float", "torch.float32", "bf16", None])
def test_plan_reads_grad_accum_dtype_as_deepspeed_does(name):
    from deepspeed.runtime.config import DtypeEnum

    types = {} if name is None else {"data_types": {"grad_accum_dtype": name}}
    is_fp32 = name is not None and DtypeEnum(name).value == torch.float32
    found = from_deepspeed({"zero_optimization": {"stage": 2}} | types, SMALL)
    assert found.fp32_gradients == is_fp32
    with pytest.raises(PlanError, match="grad_accum_dtype") if is_fp32 else contextlib.nullcontext():
        from_deepspeed({"zero_optimization": {"stage": 1}} | types, SMALL)


CPU = {"offload_optimizer": {"device": "cpu"}}
FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
# the stage, what else its section has, what the JSON has, and whether gradients leave during backward
WAYS = [
    (1, {}, {}, False),
    (1, CPU, {}, False),
    (2, {}, {}, True),
    (2, {}, FP32, True),
    (2, CPU, {}, True),
    (2, {"contiguous_gradients": False}, {}, False),
    (3, {}, {}, False),
]


def json_of(stage, section, keys):
    return config_of(stage, STATES, section, **keys)


def whose_gradients_move():

    deepspeed.init_distributed("gloo")
    found, model = [], torch.nn.Linear(64, 64)
    for *way, _ in WAYS:
        engine = deepspeed.initialize(model=model, config=json_of(*way))[0]
        found.append({gradient_moves_in_backward(p) for p in model.parameters()})
        engine.destroy()
        found.append({gradient_moves_in_backward(p) for p in model.parameters()})
        model = torch.nn.Linear(64, 64)
    return found


def test_plan_records_larger_layers_where_gradients_leave():
    """As an engine finds it, and a plan."""
    found = run_distributed(whose_gradients_move, 1)[0]
    # older ones gather them in a flat tensor after backward
    leaves = Version(version("deepspeed")) >= Version("0.19.8")
    assert found[::2] == [{leave and leaves} for *_, leave in WAYS]
    assert found[1::2] == [{False}] * len(WAYS)
    small, large = (int(max_graphed_work(1, leave) / MATRICES) for leave in (False, True))
    for stage, section, keys, leave in WAYS:
        for tokens, recorded in ((small, stage < 3), (small + 2, leave), (large, leave), (large + 2, False)):
            spread = from_deepspeed(json_of(stage, section, keys), SMALL, gpus=1, sequence=tokens)
            prediction = predict(SMALL, spread, all_systems()["COAT"])
            assert all(bool(memory.graphs) == recorded for memory in prediction.moments)


def test_plan_records_larger_layers_under_megatron():
    weight = torch.nn.Parameter(torch.zeros(1))
    assert not gradient_moves_in_backward(weight)
    weight.main_grad = None
    assert not gradient_moves_in_backward(weight)
    weight.main_grad = torch.zeros(1)
    assert gradient_moves_in_backward(weight)
    most = int(max_graphed_work(1, True) / MATRICES)
    for tokens in (most, most + 2):
        found = moments("COAT", framework="megatron", sequence=tokens)["layers"]
        assert bool(found.graphs) == (tokens == most)
