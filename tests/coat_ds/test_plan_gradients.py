"""What `coat plan` counts of gradients in FP32, and of ZeRO-3's second copy of weights; and where gradients
leave room for graphs of larger layers."""

import dataclasses
from importlib.metadata import version

import deepspeed
import pytest
import torch
from packaging.version import Version

from coat_ds.plan import layout, predict, rungs
from coat_ds.plan.gathers import Limits
from coat_kernels.graphs import gradient_leaves, graphed_work
from tests.coat_ds.test_plan import MATRICES, NORMS, SMALL, TABLE, moments
from tests.util import run_distributed


@pytest.mark.parametrize("system", ["BF16", "COAT"])
def test_gradients_added_up_in_fp32_at_stage_1_are_one_buffer(system):
    n, fp32 = SMALL.parameters, {"gpus": 4, "stage": 1, "fp32_gradients": True}
    found = moments(system, **fp32)
    # those in BF16 stay beside it until the step is done, and are reduced as they were computed
    for moment, beside in (("loss", 0), ("layers", 0), ("gradients", 2 * n), ("step", 2 * n)):
        assert found[moment].gradients == 4 * n + beside
    assert found["gradients"].buffers - found["loss"].buffers == 2 * n
    assert moments(system, accumulation=2, **fp32)["loss"].gradients == 4 * n + 2 * n
    # the step takes them as they are
    assert found["step"].temporaries == 0
    in_fp32 = moments(system, fp32_messages=True, **fp32)["gradients"]
    assert in_fp32.buffers == found["loss"].buffers
    at_once = moments(system, immediate_update=True, accumulation=2, **fp32)
    assert {memory.gradients - 2 * TABLE * (name == "head") for name, memory in at_once.items()} == {4 * n}


def test_gradients_added_up_in_fp32_have_four_bytes():
    n = SMALL.parameters
    # where the optimizer is on the CPU without that buffer, and with its own part in one tensor
    found = moments("COAT, offload", gpus=4, stage=1, fp32_gradients=True)
    assert (found["loss"].gradients, found["gradients"].gradients) == (0, 4 * n + 4 * n / 4)
    assert found["step"].gradients == 4 * n / 4
    moments_too = dataclasses.replace(rungs()["BF16"], optimizer="transformer_engine")
    found = [moments(moments_too, gpus=4, stage=stage, fp32_gradients=True)["step"] for stage in (1, 2)]
    assert [memory.temporaries for memory in found] == [2 * 4 * n / 4, 3 * 4 * n / 4]
    for stage, offload in ((1, True), (2, False), (3, False)):
        spread = {"gpus": 4, "stage": stage, "reduce_bucket": TABLE + 10, "accumulation": 2}
        spread |= {"optimizer_device": "cpu"} if offload else {}
        found, usual = (moments(fp32_gradients=wide, **spread) for wide in (True, False))
        share = n if stage == 1 else n / 4
        assert found["loss"].gradients - usual["loss"].gradients == 2 * share
        assert found["layers"].gradients - usual["layers"].gradients == 2 * share
        # of stage 1 the bucket, too
        wider = 2 * (TABLE + 10) if stage == 1 else 0
        assert found["loss"].buffers - usual["loss"].buffers == wider
        if stage == 1:
            assert found["gradients"].gradients == 4 * n + 4 * n / 4
            assert found["gradients"].buffers - found["step"].buffers == 4 * 10
        else:
            assert found["step"].gradients == 4 * n / 4
            # in BF16 a copy of them in one piece, and one in FP32
            apart = NORMS if stage == 3 else 0
            assert usual["step"].temporaries == (2 + 4) / 4 * (4 * n / 4 - apart)
            # stage 2 has them in one piece
            assert found["step"].temporaries == (4 * n / 4 - apart if stage == 3 else 0)
            # and widens the head's on its way there
            wide = 4 * TABLE if stage == 2 else 0
            assert found["head"].temporaries - usual["head"].temporaries == wide


@pytest.mark.parametrize("stage", [1, 2])
def test_coats_gradients_are_reduced_into_what_the_step_reads(stage):
    n = SMALL.parameters
    for flat, copies in ((True, 0), (False, 2 * n / 4)):
        found = moments("COAT", gpus=4, stage=stage, flat_gradients=flat)["step"]
        assert (found.gradients, found.temporaries) == (2 * n / 4, copies)
        # a head that fits no bucket stays until backward is done, as tests/coat_ds/test_narrow_grad.py sees
        small, large = (
            moments("COAT", gpus=4, stage=stage, flat_gradients=flat, reduce_bucket=TABLE - less)["layers"]
            for less in (1, 0)
        )
        assert small.gradients - large.gradients == (2 * TABLE if flat and stage == 2 else 0)
    # torch's AdamW reads FP32
    assert moments("BF16", gpus=4, stage=stage)["step"].temporaries == (2 + 4) * n / 4
    zero = {"stage": stage, "contiguous_gradients": False}
    assert not layout.from_deepspeed({"zero_optimization": zero}).flat_gradients


@pytest.mark.parametrize("name", ["fp32", "float32", "float", "torch.float32", "bf16", None])
def test_the_type_of_gradients_is_read_as_deepspeed_reads_it(name):
    from deepspeed.runtime.config import DtypeEnum

    types = {} if name is None else {"data_types": {"grad_accum_dtype": name}}
    found = layout.from_deepspeed({"zero_optimization": {"stage": 1}} | types)
    assert found.fp32_gradients == (name is not None and DtypeEnum(name).value == torch.float32)
    assert not found.immediate_update and not found.fp32_messages
    more = {"bf16": {"enabled": True, "immediate_grad_update": True}, "communication_data_type": "FP32"}
    found = layout.from_deepspeed(types | more | {"zero_optimization": {"stage": 1}})
    assert found.immediate_update and found.fp32_messages
    fp16 = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    assert layout.from_deepspeed(types | fp16).fp32_gradients == (name not in ("bf16", None))


def test_zero3s_second_copy_is_shared_by_fewer_gpus():
    copied = SMALL.parameters - NORMS
    cpu = {"optimizer_device": "cpu", "parameter_device": "cpu"}

    def of_copies(moment: str, **more) -> float:
        found, usual = (moments(gpus=8, stage=3, second_copy=over, **more)[moment] for over in (4, 1))
        assert dataclasses.replace(found, gathered=usual.gathered) == usual
        return found.gathered - usual.gathered

    # weights that stay gathered until backward have none yet, and there is room for all of these
    assert of_copies("forward") == of_copies("loss") == 0
    # backward releases them one by one
    assert 0 <= of_copies("layers") < 2 * copied / 4
    assert of_copies("head") == of_copies("step") == 2 * copied / 4
    assert of_copies("step", optimizer_device="cpu") == 2 * copied / 4
    for moment in ("forward", "loss", "layers", "head", "step"):
        # they stay from a step's first micro-batch on
        assert of_copies(moment, accumulation=2) == 2 * copied / 4
        assert of_copies(moment, **cpu) == 0
    # with room for none
    at_once = {"prefetch": 0, "limits": Limits(max_live=0, max_reuse=0, persistence=NORMS)}
    assert of_copies("loss", **at_once) == 2 * (copied - TABLE) / 4
    # that of the embedding's, and of layers so far
    assert 2 * TABLE / 4 < of_copies("forward", **at_once) < 2 * (TABLE + 2 * MATRICES) / 4
    assert moments(gpus=8, stage=2, second_copy=4) == moments(gpus=8, stage=2)
    assert moments(gpus=1, stage=3, second_copy=4) == moments(gpus=1, stage=3)
    for size, over in ((4, 4), (1, 1), (0, 1)):
        zero = {"stage": 3, "zero_hpz_partition_size": size}
        assert layout.from_deepspeed({"zero_optimization": zero}, gpus=8).second_copy == over


CPU = {"offload_optimizer": {"device": "cpu"}}
FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
# the stage, what else its section has, what the JSON has, and whether gradients leave during backward
WAYS = [
    (0, {}, {}, False),
    (1, {}, {}, False),
    (1, {}, FP32, False),
    (1, CPU, {}, False),
    (2, {}, {}, True),
    (2, {}, FP32, True),
    (2, CPU, {}, True),
    (2, {"contiguous_gradients": False}, {}, False),
    (3, {}, {}, False),
]


def json_of(stage, section, keys):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **section},
        "optimizer": {"type": "AdamW", "params": {}},
        "coat": {"enabled": True, "activations": False, "report": False},
    }
    return config | keys


def whose_gradients_leave():

    deepspeed.init_distributed("gloo")
    found, model = [], torch.nn.Linear(64, 64)
    for *way, _ in WAYS:
        engine, *_ = deepspeed.initialize(model=model, config=json_of(*way))
        found.append({gradient_leaves(p) for p in model.parameters()})
        engine.destroy()
        found.append({gradient_leaves(p) for p in model.parameters()})
        model = torch.nn.Linear(64, 64)
    return found


def test_more_is_recorded_where_gradients_leave_their_parameters():
    """As an engine finds it, and a plan."""
    found = run_distributed(whose_gradients_leave, 1)[0]
    # older ones gather them in a flat tensor behind backward
    leaves = Version(version("deepspeed")) >= Version("0.19.8")
    assert found[::2] == [{leave and leaves} for *_, leave in WAYS]
    assert found[1::2] == [{False}] * len(WAYS)
    small, large = (int(graphed_work(1, leave) / MATRICES) for leave in (False, True))
    for stage, section, keys, leave in WAYS:
        for tokens, recorded in ((small, stage < 3), (small + 2, leave), (large, leave), (large + 2, False)):
            spread = layout.from_deepspeed(json_of(stage, section, keys), gpus=1, sequence=tokens)
            prediction = predict(SMALL, spread, rungs()["COAT"])
            assert all(bool(memory.graphs) == recorded for memory in prediction.moments)


def test_megatrons_data_parallelism_takes_gradients_out_of_the_way():
    weight = torch.nn.Parameter(torch.zeros(1))
    assert not gradient_leaves(weight)
    weight.main_grad = None
    assert not gradient_leaves(weight)
    weight.main_grad = torch.zeros(1)
    assert gradient_leaves(weight)
    most = int(graphed_work(1, True) / MATRICES)
    for tokens in (most, most + 2):
        found = moments("COAT", host="megatron", stage=0, sequence=tokens)["layers"]
        assert bool(found.graphs) == (tokens == most)
