"""`coat plan`: what it predicts, compared with sums by hand, and layouts it reads."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from coat_ds import CoatAdamW, cli, plan
from coat_ds.optim.host_states import CHUNK
from coat_ds.plan import Layout, PlanError, Sizes, advice, all_systems, from_deepspeed
from coat_ds.plan.command import configured
from coat_ds.plan.model_states import stepped_bytes
from coat_ds.plan.systems import coat
from coat_kernels.graphs import max_graphed_work
from tests.coat_ds.planned import MATRICES, NORMS, SMALL, TABLE, moments

# GPUs on which only GEMMs or only copies take time, at a thousand operations or bytes a second: milliseconds
# are counts
GEMMS, COPIES = (
    dataclasses.replace(plan.GPUS["h200"], **dict.fromkeys(("fp8", "attention", "link"), 1e30), **rates)
    for rates in ({"bf16": 1e3, "copy": 1e30}, {"bf16": 1e30, "copy": 1e3})
)

ROOT = Path(__file__).parents[2]


def test_plan_without_fp8_has_smaller_states_alone(tmp_path, capsys):
    (tmp_path / "ds.json").write_text(json.dumps({"coat": {"enabled": True}}))
    shape = ["plan", str(ROOT / "configs/model_llama2_7b.json"), "--vocabulary", "32000", "--gpu", "a100"]
    assert cli.main([*shape, "--json"]) == 0
    found = {system["system"]: system["roles"] for system in json.loads(capsys.readouterr().out)["systems"]}
    assert found.keys() == {"BF16", "BF16, recompute", "COAT, states alone"}
    # 8 bytes of moments a parameter, 2.07 of COAT's
    assert found["COAT, states alone"]["states"] == pytest.approx(
        2.07 / 8 * found["BF16"]["states"], rel=0.01
    )
    # layers of the block stay in BF16, as in an engine
    assert cli.main([*shape, "--deepspeed", str(tmp_path / "ds.json"), "--stage", "2", "--json"]) == 0
    configured = json.loads(capsys.readouterr().out)["systems"][-1]
    assert configured["roles"] == found["COAT, states alone"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_plan_has_what_is_offloaded_in_host_memory(stage):
    n, offloaded = SMALL.parameters, {"offload_optimizer": True}
    found = moments(gpus=4, stage=stage, **offloaded)
    assert all(memory.masters == memory.states == 0 for memory in found.values())
    # DeepSpeed moves gradients as they come; at stage 1 when all are there
    if stage == 1:
        assert found["gradients"].gradients == 2 * n
    else:
        assert found["layers"].gradients == 0
    assert found["step"].total == found["step"].weights + found["step"].buffers
    # masters, both moments and gradients in FP32
    spread = Layout(gpus=4, stage=stage, sequence=8, **offloaded)
    assert plan.predict(SMALL, spread, all_systems()["BF16"]).on_host == (4 + 8 + 4) * n / 4
    # which COAT's step streams through the GPU: a model smaller than a chunk at once
    ours = plan.predict(SMALL, spread, all_systems()["COAT"])
    assert ours.moments[-1].temporaries == ours.on_host < (4 + 8 + 4) * n / 4
    # FP32 sums of earlier micro-batches stay on the GPU at stage 2, in the tensor that the CPU's step reads
    one, several = (
        moments(gpus=4, stage=2, accumulation=k, fp32_gradients=True, **offloaded) for k in (1, 3)
    )
    assert several["loss"].gradients - one["loss"].gradients == 4 * n / 4
    if stage == 3:
        parts = dataclasses.replace(spread, offload_parameters=True)
        prediction = plan.predict(SMALL, parts, all_systems()["BF16"])
        assert prediction.on_host == (4 + 8 + 4 + 2) * n / 4
        assert prediction.peak.weights == 2 * NORMS


def test_plan_has_streamed_states_in_host_memory():
    resident, streamed, half = (
        coat("of BF16 masters", {"optimizer": {"offload": where}}, bf16_masters=True)
        for where in ("none", "cpu", 1e-4)
    )
    spread = Layout(gpus=4, stage=2, sequence=8)
    here, there, between = (plan.predict(SMALL, spread, system) for system in (resident, streamed, half))
    states = here.peak.states
    assert (here.on_host, there.on_host, between.on_host) == (0, states, states - 1e5)
    assert (there.peak.states, between.peak.states) == (0, 1e5)
    assert there.peak.masters == here.peak.masters > 0
    # a model smaller than a chunk passes through in one
    assert there.moments[-1].temporaries - here.moments[-1].temporaries == pytest.approx(states)
    times = (plan.step_time(SMALL, spread, s, plan.GPUS["h100"]).optimizer for s in (resident, streamed))
    least = states / 45e9 * 1e3
    assert next(times) < 0.1 * least and next(times) == pytest.approx(least)


def test_plan_of_released_gradients_and_streamed_states_leaves_the_weights():
    """On one GPU, without masters; with more tokens backward hides the copies."""
    seven = Sizes(layers=32, hidden=4096, ffn=11008, heads=32, groups=32, head_dim=128, vocabulary=32000)
    system = all_systems()["COAT, PyTorch, streamed states"]
    assert advice.goes_with(system, Layout(stage=2)) and not advice.goes_with(system, Layout(gpus=2, stage=2))
    layouts, n = [Layout(stage=2, micro_batch=rows) for rows in (1, 16)], seven.parameters
    for prediction in (plan.predict(seven, layout, system) for layout in layouts):
        backward = next(memory for memory in prediction.moments if memory.moment == "layers")
        assert (backward.weights, backward.masters, backward.states) == (2 * n, 0, 0)
        # a chunk, what waits, and the head
        assert backward.gradients == 2 * (CHUNK + 2**29 + seven.table)
        assert prediction.on_host == pytest.approx(4.07 * n, rel=0.01)
    short, long = (plan.step_time(seven, layout, system, plan.GPUS["h100"]) for layout in layouts)
    assert 0 == long.optimizer < short.optimizer


@pytest.mark.parametrize("how", ["exact", "stochastic"])
def test_plan_states_of_bf16_parameters_are_the_optimizers(how):
    p = torch.nn.Parameter(torch.zeros(1024, dtype=torch.bfloat16))
    optimizer = CoatAdamW([p], min_numel=0, bf16_params=how)
    p.grad = torch.ones_like(p)
    optimizer.step()
    tensors = [t for value in optimizer.state[p].values() for t in tensors_of(value)]
    system = coat(how, {"optimizer": {"bf16_params": how}}, bf16_masters=True)
    assert stepped_bytes(1024, 0, system) == (2 * 1024, sum(t.nbytes for t in tensors))


def tensors_of(value) -> list[torch.Tensor]:
    """What a value of a state holds: the codes and scales of a stored moment, or a tensor."""
    if hasattr(value, "pieces"):
        return [t for piece in value.pieces for t in piece.storage]
    return [value] if torch.is_tensor(value) and value.numel() > 1 else []


def test_plan_gives_stages_of_a_pipeline_their_parts():
    """The first has the embedding and saves a micro-batch for each stage; the last has the head."""
    model = dataclasses.replace(SMALL, layers=4, vocabulary=32000)
    spread = Layout(framework="megatron", fp32_gradients=True, gpus=2, pipeline=2, sequence=8, accumulation=4)
    part = 2 * MATRICES + 32000 * 64 + (4 + 1) * 64
    found = plan.predict(model, spread, all_systems()["BF16"])
    assert found.peak.moment == "loss"
    assert (found.peak.weights, found.peak.gradients, found.peak.masters) == (2 * part, 4 * part, 4 * part)
    few = dataclasses.replace(spread, sequence=256, micro_batch=8)
    first = plan.predict(dataclasses.replace(model, vocabulary=8), few, all_systems()["BF16"]).peak
    last = plan.predict(model, few, all_systems()["BF16"]).peak
    assert first.moment == "layers" and first.saved == 2 * last.saved
    with pytest.raises(PlanError, match="--pipeline: 2 does not divide the 3 layers"):
        plan.predict(dataclasses.replace(model, layers=3), spread, all_systems()["BF16"])


def test_plan_reads_a_deepspeed_json():
    config = json.loads((ROOT / "configs/ds_zero2_offload_coat.json").read_text())
    config["train_micro_batch_size_per_gpu"] = 4
    found = from_deepspeed(config, SMALL, gpus=4, sequence=128)
    assert (found.stage, found.micro_batch, found.offload_optimizer) == (2, 4, True)
    config["zero_optimization"] |= {"stage": 3, "stage3_max_live_parameters": 1e6, "overlap_comm": False}
    config["zero_optimization"]["reduce_bucket_size"] = "auto"
    found = from_deepspeed(config, SMALL, gpus=4, micro_batch=1)
    assert found.reduce_bucket == 64 * 64 and not found.offload_parameters
    assert (found.max_live, found.overlap, found.micro_batch) == (10**6, False, 1)
    # what goes on to a disk leaves the GPU, too
    config["zero_optimization"]["offload_optimizer"] = {"device": "nvme"}
    found = from_deepspeed(config, SMALL)
    assert found.offload_optimizer
    config = json.loads((ROOT / "configs/ds_zero3_offload_coat.json").read_text())
    assert from_deepspeed(config, SMALL).offload_parameters


STAGE_1 = {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    "said",
    [
        {"train_batch_size": 64},
        {"train_batch_size": 64, "gradient_accumulation_steps": 2},
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8},
        {"train_micro_batch_size_per_gpu": 8},
        {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2},
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_plan_batches_are_those_that_deepspeed_makes_of_a_json(said, monkeypatch):
    from deepspeed.runtime import config

    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: 4)
    read = config.DeepSpeedConfig(dict(said))
    found = from_deepspeed(STAGE_1 | said, SMALL, gpus=4)
    assert found.micro_batch == read.train_micro_batch_size_per_gpu
    assert found.accumulation == read.gradient_accumulation_steps
    # what is given with the JSON replaces it
    given = from_deepspeed(STAGE_1 | said, SMALL, gpus=4, micro_batch=3, accumulation=5)
    assert (given.micro_batch, given.accumulation) == (3, 5)


def test_plan_fills_in_auto_as_trainer_does(tmp_path):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    filled_in = HfTrainerDeepSpeedConfig(config)
    model = SimpleNamespace(config=transformers.LlamaConfig(hidden_size=992, num_attention_heads=31))
    filled_in.trainer_config_finalize(transformers.TrainingArguments(tmp_path, use_cpu=True), model, 1)
    found = from_deepspeed(config, dataclasses.replace(SMALL, hidden=992))
    assert found.reduce_bucket == filled_in.config["zero_optimization"]["reduce_bucket_size"]


def test_plan_is_of_what_a_block_says():
    block = {"enabled": True, "optimizer": {"enabled": False}, "fp8_activation_checkpointing": True}
    found = configured({"coat": block})
    assert (found.layers, found.optimizer, found.recompute) == ("coat", "adamw", "full")
    for key in ("bf16", "bfloat16"):
        block = {"enabled": True, "activations": False}
        found = configured({"coat": block, key: {"bf16_master_weights_and_grads": True}})
        assert (found.layers, found.optimizer, found.recompute) == ("bf16", "coat", "none")
        assert found.bf16_masters
    # layers are unchanged
    found = configured({"coat": {"enabled": True}, "fp16": {"enabled": True}})
    assert (found.layers, found.optimizer) == ("bf16", "coat")


def test_plan_operations_and_bytes_of_a_step_are_those_on_paper():
    n = SMALL.parameters
    assert n == 2 * MATRICES + 2 * TABLE + NORMS

    def time(system: str, gpu: plan.Gpu, **spread) -> plan.Time:
        return plan.step_time(SMALL, Layout(sequence=8, **spread), all_systems()[system], gpu)

    # two operations an element and token forward, four backward
    products = 6 * 8 * (2 * MATRICES + TABLE)
    assert time("BF16", GEMMS).compute == pytest.approx(products)
    assert time("BF16", GEMMS, accumulation=4).compute == pytest.approx(4 * products)
    assert time("BF16, recompute", GEMMS).compute == pytest.approx(products + 2 * 8 * 2 * MATRICES)
    assert plan.flops(SMALL, 1, 8) == products + 2 * 6 * 8 * 8 * 64
    # moments and masters are read and written, gradients read, weights written; BF16 gradients are first FP32
    states = (2 + 9 / 128) * (n - NORMS) + 8 * NORMS
    assert time("COAT", COPIES, gpus=4).optimizer == pytest.approx((2 * states + 12 * n) / 4)
    assert time("BF16", COPIES, gpus=4).optimizer == pytest.approx(n / 4 * (16 + 8 + 4 + 10))


def test_plan_records_small_layers():
    """As `uses_graphs` draws the line: tokens of all ranks times a rank's part of a layer."""
    for tensor in (1, 2):
        most = int(max_graphed_work(tensor) / MATRICES)
        spread = {"gpus": tensor, "tensor": tensor}
        recorded, launched = (
            moments("COAT", sequence=n, **spread) for n in (tensor * most, tensor * most + 2)
        )
        assert recorded["layers"].graphs and not recorded["layers"].saved
        assert launched["layers"].saved and not launched["layers"].graphs
    assert not moments("COAT", gpus=2, stage=3)["layers"].graphs
    assert not moments("COAT, recompute")["layers"].graphs


@pytest.mark.parametrize("system", ["COAT", "COAT, smallest, recomputed attention"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_plan_engines_and_checkpoints_take_less_than_a_step(gpus, stage, system):
    sizes = Sizes(layers=32, hidden=4096, ffn=11008, heads=32, groups=32, head_dim=128, vocabulary=32000)
    layout = Layout(gpus=gpus, stage=stage, sequence=512)
    peak = plan.predict(sizes, layout, all_systems()[system]).peak
    # DeepSpeed's gradients of zeros, before there are states
    assert peak.weights + 2 * peak.masters < peak.total
    # a load makes each moment when the old one is gone; a compressed one's second moment is copied
    assert peak.weights + peak.masters + 1.5 * peak.states < peak.total
