"""`coat plan`: what it predicts beside what stands on paper, and layouts it reads."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from coat_ds import CoatAdamW, CoatConfig, cli, plan
from coat_ds.plan import Layout, Sizes, advice, gathers, layout, rungs
from coat_ds.plan.command import configured
from coat_ds.plan.gathers import Limits, replay
from coat_ds.plan.memory import stepped_bytes
from coat_ds.plan.roofline import flops
from coat_ds.plan.systems import coat
from coat_kernels.graphs import graphed_work

ROOT = Path(__file__).parents[2]
LAUNCHED = coat("launched", {"activations": {"cuda_graphs": False}})

SMALL = Sizes(layers=2, hidden=64, ffn=128, heads=4, groups=2, head_dim=16, vocabulary=512)
# a thousand operations or bytes a second: times in milliseconds are counts
COUNTING = dataclasses.replace(
    plan.GPUS["h200"], **dict.fromkeys(("bf16", "fp8", "attention", "copy", "link"), 1e3)
)


def counts(system: str = "BF16", **spread):
    return plan.step_time(SMALL, Layout(sequence=8, **spread), rungs()[system], COUNTING)


def test_operations_and_bytes_of_a_step_are_those_on_paper():
    matrices, table, n = 64 * (128 + 64 + 256 + 128), 512 * 64, SMALL.parameters
    assert n == 2 * matrices + 2 * table + 5 * 64
    # two operations an element and token forward, four backward; attention's scores and sums over half of the
    # keys forward, and two and a half times that backward
    assert counts().products == pytest.approx(6 * 8 * (2 * matrices + table))
    assert counts().attention == pytest.approx(3.5 * 2 * 2 * 8 * 8 * 64)
    assert flops(SMALL, 1, 8) == pytest.approx(counts().products + 2 * 6 * 8 * 8 * 64)
    assert counts(accumulation=4).products == pytest.approx(4 * counts().products)
    # moments and masters are read and written, gradients read, weights written; BF16 gradients are first FP32
    states = 2 * (2 + 9 / 128) + 8 + 4
    assert counts("COAT", stage=0, gpus=4).optimizer == pytest.approx(n * states)
    assert counts("COAT", gpus=4).optimizer == pytest.approx(n / 4 * states)
    assert counts(gpus=4).optimizer == pytest.approx(n / 4 * (16 + 8 + 4 + 10))


def test_operations_of_what_is_made_again_are_those_on_paper():
    """Forward once more: of whole layers, of the first product of a feed-forward, or of attention."""
    plain = counts()
    layers = 2 * 64 * (128 + 64 + 256 + 128)
    assert counts("BF16, recompute").products == pytest.approx(plain.products + 2 * 8 * layers)
    assert counts("BF16, recompute").attention == pytest.approx(plain.attention * 4.5 / 3.5)
    attention = counts("COAT, recomputed attention")
    assert attention.products == pytest.approx(plain.products + 2 * 8 * 2 * 64 * 128)
    assert attention.attention == pytest.approx(plain.attention * 4.5 / 3.5)
    mlp = plan.System(name="mlp", recompute="mlp")
    found = plan.step_time(SMALL, Layout(sequence=8), mlp, COUNTING)
    assert found.products == pytest.approx(plain.products + 2 * 8 * 2 * 64 * 256)
    assert found.attention == pytest.approx(plain.attention)
    # three passes over the layers' bytes become four
    more = dataclasses.replace(SMALL, layers=4)
    once, again = (
        plan.step_time(more, Layout(sequence=8), rungs()[name], COUNTING).bytes - counts(name).bytes
        for name in ("BF16", "BF16, recompute")
    )
    assert again == pytest.approx(4 / 3 * once)


def test_stages_of_a_pipeline_share_the_products():
    assert counts(gpus=2, pipeline=2).products == pytest.approx(counts().products / 2)


def test_a_step_on_the_cpu_takes_its_time_and_the_links():
    """Gradients and weights of two bytes at 55 GB/s, and 4.4 ns an element of one of 16 cores."""
    expected = 1e3 * SMALL.parameters / 4 * (4 / 55e9 + 4.4e-9 / 16)
    assert counts("COAT, offload", gpus=4).optimizer == pytest.approx(expected)
    assert counts(gpus=4, optimizer_device="cpu").optimizer == pytest.approx(expected)


def test_masters_in_bf16_are_moved_as_such():
    found = counts("COAT, smallest, recomputed attention", gpus=4).optimizer
    assert found == pytest.approx(SMALL.parameters / 4 * (2 * (2 + 9 / 128) + 2 * 2 + 4))


def test_gpus_are_known_by_torchs_names():
    names = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    assert [plan.gpu_called(name).name for name in names] == ["H100", "H200"]


def test_without_fp8_the_states_alone_are_smaller(tmp_path, capsys):
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


def moments(system="BF16", model: Sizes = SMALL, **spread) -> dict[str, plan.Memory]:
    system = rungs()[system] if isinstance(system, str) else system
    found = plan.predict(model, Layout(**{"sequence": 8} | spread), system)
    return {memory.moment: memory for memory in found.moments}


# elements of SMALL's matrices in a layer, of its embedding, and of all of its norms
MATRICES, TABLE, NORMS = 64 * (128 + 64 + 256 + 128), 512 * 64, 5 * 64


def test_weights_are_what_a_gpu_has():
    whole = 2 * MATRICES + NORMS
    assert moments()["loss"].weights == 2 * (whole + 2 * TABLE)
    tied = dataclasses.replace(SMALL, tied=True)
    assert moments(model=tied)["loss"].weights == 2 * (whole + TABLE)
    # the last stage of a pipeline has a head all the same, and the last norm
    last = moments(model=tied, gpus=2, pipeline=2, stage=1)
    assert last["loss"].weights == 2 * (MATRICES + 3 * 64 + TABLE)
    biased = dataclasses.replace(SMALL, other_parameters=1000)
    assert moments(model=biased)["loss"].weights == 2 * (whole + 2 * TABLE + 1000)
    # norms are too small to be divided
    assert moments(gpus=4, stage=3)["loss"].weights == 2 * (whole + 2 * TABLE) / 4 + 2 * NORMS
    # one GPU has all that it needs
    alone = moments(gpus=1, stage=3, limits=Limits(persistence=0))
    assert "forward" not in alone and not any(memory.gathered for memory in alone.values())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_offloaded_takes_the_cpus_memory(stage):
    n, cpu = SMALL.parameters, {"optimizer_device": "cpu"}
    found = moments(gpus=4, stage=stage, **cpu)
    assert all(memory.masters == memory.states == 0 for memory in found.values())
    # DeepSpeed moves gradients as they come; at stage 1 when all are there
    if stage == 1:
        assert found["gradients"].gradients == 2 * n
    else:
        assert found["layers"].gradients == 0
    assert found["step"].total == found["step"].weights + found["step"].buffers
    # masters, both moments and gradients in FP32
    spread = Layout(gpus=4, stage=stage, sequence=8, **cpu)
    assert plan.predict(SMALL, spread, rungs()["BF16"]).host == (4 + 8 + 4) * n / 4
    if stage == 3:
        parts = dataclasses.replace(spread, parameter_device="cpu")
        prediction = plan.predict(SMALL, parts, rungs()["BF16"])
        assert prediction.host == (4 + 8 + 4 + 2) * n / 4
        assert prediction.peak.weights == 2 * NORMS


def test_a_bucket_is_filled_while_another_is_reduced():
    one, two = (moments(stage=2, reduce_bucket=1000, overlap=overlap) for overlap in (None, True))
    assert two["layers"].buffers - one["layers"].buffers == 2 * 1000
    one, two = (moments(stage=3, reduce_bucket=1000, overlap=overlap) for overlap in (False, True))
    assert one == two


def test_the_heads_gradient_comes_first_and_leaves_through_the_bucket():
    assert moments(stage=1)["head"].gradients == 2 * TABLE
    assert moments(stage=2, gpus=4)["head"].gradients == 2 * TABLE + 2 * SMALL.parameters / 4
    # stage 1 copies into a bucket what fits: the embedding here, and not the matrix behind it
    with_bucket = moments(stage=1, reduce_bucket=TABLE + 10)["gradients"].buffers
    assert with_bucket - moments(stage=1)["layers"].buffers == 2 * 10


def test_inputs_of_layers_are_kept_in_eight_bits_where_they_are_compressed():
    more, tokens = dataclasses.replace(SMALL, layers=4), 8
    for system, size in (("BF16, recompute", 2), ("COAT, recompute", 1 + 4 / 128)):
        found = moments(system, more)["layers"].saved - moments(system)["layers"].saved
        assert found == 2 * tokens * 64 * size


def test_quantized_gathers_have_codes_beside_what_they_are_decoded_to():
    """The largest product's weights while they are copied out of their buffer."""
    limits = Limits(prefetch=0, max_reuse=0, persistence=64)
    for quantized, size in ((False, 2 + 2), (True, 2 + 2 + 1)):
        spread = {"gpus": 2, "sequence": 1, "limits": limits, "quantized_gathers": quantized}
        found = moments(stage=3, **spread)["forward"]
        assert found.gathered == size * 64 * 256


def test_zero3_steps_whole_parameters_until_there_are_enough():
    """Gradients in BF16 and FP32 of the embedding alone, or of all matrices."""
    for sub_group, numel in (
        (1, TABLE),
        (TABLE // 2 + 1, TABLE + 64 * 128),
        (10**9, 2 * TABLE + 2 * MATRICES),
    ):
        assert moments(gpus=2, stage=3, sub_group=sub_group)["step"].temporaries == (2 + 4) * numel / 2


@pytest.mark.parametrize(("plain", "again"), [("BF16", "BF16, recompute"), (LAUNCHED, "COAT, recompute")])
def test_a_layer_that_is_made_again_takes_what_it_would_have_saved(plain, again):
    long = {"sequence": 4096}
    # what two layers more save, without what is saved once for all
    more = dataclasses.replace(SMALL, layers=4)
    of_layers = moments(plain, more, **long)["layers"].saved - moments(plain, **long)["layers"].saved
    found = moments(again, **long)["layers"].temporaries - moments(plain, **long)["layers"].temporaries
    # Megatron's own layers save cosine and sine of each position, here of 16 channels, twice
    assert found == of_layers / 2 - (4096 * 16 * 2 * 4 if plain == "BF16" else 0)


def test_attention_that_is_made_again_is_there_with_its_gradients():
    """Queries, keys, values and the output; more than the gradients of a narrow feed-forward layer."""
    narrow = dataclasses.replace(SMALL, ffn=16)
    again = coat("again", {"activations": {"cuda_graphs": False, "attention_format": "recompute"}})
    found = moments(again, narrow)["layers"].temporaries
    assert found == 2 * 8 * 64 + 2 * 2 * 8 * (128 + 64)


def test_recorded_layers_hold_what_they_save():
    """And an input and two gradients of hidden states."""
    graphs = moments(coat("graphs", {"activations": {"cuda_graphs": True}}))["layers"]
    plain = moments(LAUNCHED)["layers"]
    assert (graphs.saved, plain.graphs) == (0, 0)
    assert graphs.graphs == plain.saved + 3 * 2 * 8 * 64


def test_layers_are_recorded_where_they_are_small():
    """As `uses_graphs` draws the line: tokens of all ranks times a rank's part of a layer."""
    for tensor in (1, 2):
        most = int(graphed_work(tensor) / MATRICES)
        spread = {"gpus": tensor, "tensor": tensor}
        recorded, launched = (
            moments("COAT", sequence=n, **spread) for n in (tensor * most, tensor * most + 2)
        )
        assert recorded["layers"].graphs and not recorded["layers"].saved
        assert launched["layers"].saved and not launched["layers"].graphs
    assert not moments("COAT", gpus=2, stage=3)["layers"].graphs
    assert not moments("COAT, recompute")["layers"].graphs


@pytest.mark.parametrize("how", ["exact", "stochastic"])
def test_states_of_bf16_parameters_are_the_optimizers(how):
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


def test_stage_0_makes_fp32_of_all_gradients_twice():
    """DeepSpeed's FP16_Optimizer, one by one and then in one tensor."""
    for system in ("BF16", "COAT"):
        (step,) = (
            moment
            for moment in plan.predict(SMALL, Layout(sequence=8, stage=0), rungs()[system]).moments
            if moment.moment == "step"
        )
        assert step.gradients == 2 * SMALL.parameters
        assert step.temporaries == 2 * 4 * SMALL.parameters


@pytest.mark.parametrize("system", ["COAT", "COAT, smallest, recomputed attention"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_engines_and_checkpoints_take_less_than_a_step(gpus, stage, system):
    sizes = Sizes(layers=32, hidden=4096, ffn=11008, heads=32, groups=32, head_dim=128, vocabulary=32000)
    layout = Layout(gpus=gpus, stage=stage, sequence=512)
    peak = plan.predict(sizes, layout, rungs()[system]).peak
    # DeepSpeed's gradients of zeros, before there are states
    assert peak.weights + 2 * peak.masters < peak.total
    # a load makes each moment when the old one is gone; a compressed one's second moment is copied
    assert peak.weights + peak.masters + 1.5 * peak.states < peak.total


@pytest.mark.parametrize(
    "system, spread, bytes_each",
    [
        ("COAT", {"stage": 1}, 2),
        # in a buffer that stays
        ("COAT", {"stage": 1, "fp32_gradients": True}, 0),
        ("COAT, smallest, recomputed attention", {"stage": 1}, 2),
        # DeepSpeed's step reads gradients in FP32
        ("BF16", {"stage": 1}, 4),
        ("COAT, offload", {"stage": 1}, 0),
        ("COAT", {"stage": 2}, 0),
        ("COAT", {"stage": 3}, 0),
        ("COAT", {"stage": 1, "host": "megatron"}, 0),
    ],
)
def test_room_is_left_for_the_gradients_that_stage_1_makes_anew(system, spread, bytes_each):
    """Beside what a step holds before, not beside other gradients."""
    for tokens in (1, 512):
        layout = Layout(gpus=2, sequence=tokens, reduce_bucket=100, **spread)
        found = plan.predict(SMALL, layout, rungs()[system])
        assert found.in_one_piece == bytes_each * SMALL.parameters / 2
        before = [m.total for m in found.moments if m.moment in ("loss", "forward", "head", "layers")]
        assert found.with_room == max(found.peak.total, max(before) + found.in_one_piece)
        if spread == {"stage": 1} and system == "COAT":
            # few activations are gone when gradients are there
            assert (found.with_room == found.peak.total) == (tokens == 1)


def test_messages_of_a_step_are_those_on_paper():
    """What a GPU of four sends: three quarters of what is gathered, and of what is reduced."""
    whole = 2 * SMALL.parameters * 3 / 4
    for stage, accumulation, times in ((1, 1, 2), (1, 4, 2), (2, 1, 2), (2, 4, 5), (3, 1, 3), (3, 4, 12)):
        found = counts(gpus=4, stage=stage, accumulation=accumulation).messages
        assert found == pytest.approx(times * whole), (stage, accumulation)
    assert counts(gpus=4, stage=3, quantized_gathers=True).messages == pytest.approx(2 * whole)
    # of half of the hidden states two gathers and two reductions a layer forward, and four and two backward:
    # gradients, and inputs once more; and half of the model
    hidden, model = 2 * 8 * 64 / 2, 2 * (2 * SMALL.parameters / 2) / 2
    split = {"gpus": 4, "tensor": 2, "stage": 1}
    assert counts(**split).messages == pytest.approx((6 + 4) * 2 * hidden + model)
    # FP8 codes are gathered
    assert counts("COAT", **split).messages == pytest.approx((6 + 4 * 2) * hidden + model)
    # sums are a reduction and a gather
    for system in ("BF16", "COAT"):
        found = counts(system, **split, sequence_parallel=False).messages
        assert found == pytest.approx(4 * 2 * 2 * hidden + model)


def test_stages_of_a_pipeline_wait_and_hold():
    found = counts(gpus=2, pipeline=2, stage=1, accumulation=4)
    assert found.bubble == pytest.approx((found.products + found.attention + found.bytes) / 4)
    # the first stage, fuller than the last with its few logits, holds as many micro-batches as stages
    model, system = dataclasses.replace(SMALL, vocabulary=16), rungs()["BF16"]
    spread = Layout(gpus=2, pipeline=2, sequence=8192, reduce_bucket=1)
    one, two = (
        plan.predict(model, dataclasses.replace(spread, accumulation=count), system).peak.saved
        for count in (1, 4)
    )
    assert two == pytest.approx(2 * one) and one > 0


def test_small_micro_batches_keep_a_pipeline_busy():
    spread = Layout(gpus=4, pipeline=4, sequence=8, host="megatron", global_batch=8)
    model = dataclasses.replace(SMALL, layers=4)
    choice = advice.fastest(model, [(rungs()["BF16"], spread)], COUNTING, 1e12, True)
    # of one micro-batch three stages of four wait, of eight for three eighths of the time
    assert (choice.layout.micro_batch, choice.layout.accumulation) == (1, 8)
    one = dataclasses.replace(spread, gpus=1, pipeline=1)
    choice = advice.fastest(model, [(rungs()["BF16"], one)], COUNTING, 1e12, True)
    assert (choice.layout.micro_batch, choice.layout.accumulation) == (8, 1)


def test_tokens_a_second_are_a_gpus():
    spread = Layout(gpus=4, tensor=2, stage=1, micro_batch=3, sequence=8, accumulation=2)
    (choice,) = advice.compare(SMALL, spread, [rungs()["BF16"]], COUNTING)
    assert choice.tokens_per_second == pytest.approx(3 * 8 * 2 * 2 / 4 / (choice.time.total / 1e3))


def test_gathers_follow_deepspeeds_limits():
    layer = [50, 20, 90, 40]
    modules = [[30], *[[n] for n in 6 * layer], [60]]
    none = Limits(prefetch=0, max_live=10**9, max_reuse=0, persistence=0)
    # each module's own weights, and nothing else
    alone = replay(modules, none)
    assert [g.runs[:2] for g in alone] == [(m[0], 0) for m in modules + modules[::-1]]
    # in the buffer that it came in, and copied out of it
    assert all(g.begins[:2] == (g.runs.weights, g.runs.weights) for g in alone)
    # released are those before, each once
    whole = 30 + 6 * 200 + 60
    assert [g.runs.released for g in alone[:4]] == [0, 30, 30 + 50, 30 + 50 + 20]
    assert [g.begins.released for g in alone[len(modules) + 1 :]] == [whole] * (len(modules) - 1)
    everything = Limits(prefetch=0, max_live=10**9, max_reuse=10**9, persistence=0)
    kept = replay(modules, everything)
    assert kept[len(modules) - 1].runs == (whole, 0, 0)
    assert kept[-1].begins.released == whole - 30
    small_stay = replay(modules, none._replace(persistence=50))
    assert small_stay[1].runs.weights == 0 and small_stay[3].runs.weights == 90
    ahead = replay(modules, none._replace(prefetch=60))
    # two came together, of which the second is not yet asked for; a third is on its way
    assert ahead[1] == ((50 + 20, 50 + 20, 30), (50 + 20, 50 + 20 + 90, 30))
    # a search asks again and again, and is not kept waiting
    assert replay([list(module) for module in modules], none._replace(prefetch=60)) is ahead
    capped = replay(modules, none._replace(prefetch=60, max_live=100))
    assert max(sum(g.runs[:2]) for g in capped) < max(sum(g.runs[:2]) for g in ahead)


def test_a_unit_begins_with_its_weights_in_two_buffers():
    """Its first parameter came with the unit before, the others with the next one's first two."""
    unit, limits = [10, 30, 40, 20], Limits(prefetch=101, max_live=10**9, max_reuse=0, persistence=0)
    third = replay(4 * [unit], limits)[2]
    first, second = 100 + 10, 30 + 40 + 20 + 10 + 30
    assert third.begins == (100 + 10 + 30, first + second, 2 * 100)
    # the first is read; what comes next is on its way
    assert third.runs == (100 + 10 + 30, second + 140, 2 * 100)


def test_a_deepspeed_json_is_read():
    from deepspeed.runtime.config import DeepSpeedConfig

    config = json.loads((ROOT / "configs/ds_zero2_offload_coat.json").read_text())
    config["train_micro_batch_size_per_gpu"] = 4
    found = layout.from_deepspeed(config, gpus=4, sequence=128)
    assert (found.stage, found.micro_batch, found.optimizer_device) == (2, 4, "cpu")
    config["zero_optimization"] |= {"stage": 3, "stage3_prefetch_bucket_size": 1e6, "overlap_comm": False}
    config["zero_optimization"]["reduce_bucket_size"] = "auto"
    found = layout.from_deepspeed(config, 64, gpus=4, micro_batch=1)
    assert found.reduce_bucket == 64 * 64
    assert (found.prefetch, found.overlap, found.micro_batch) == (10**6, False, 1)
    assert found.parameter_device == "gpu" and found.limits == Limits()
    keys = "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_param_persistence_threshold"
    config["zero_optimization"] |= dict(zip(keys, (30, 20, 10), strict=True))
    assert layout.from_deepspeed(config, 64).limits == Limits(max_live=30, max_reuse=20, persistence=10)
    config["zero_optimization"]["zero_quantized_weights"] = True
    assert layout.from_deepspeed(config, 64).quantized_gathers
    # what goes on to a disk leaves the GPU, too
    config["zero_optimization"]["offload_optimizer"] = {"device": "nvme"}
    assert layout.from_deepspeed(config, 64).optimizer_device == "cpu"
    config = json.loads((ROOT / "configs/ds_zero3_offload_coat.json").read_text())
    assert layout.from_deepspeed(config).parameter_device == "cpu"
    # as DeepSpeed, which takes its old keys too
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}
    read = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": zero}).zero_config
    found = layout.from_deepspeed({"zero_optimization": zero})
    assert (found.optimizer_device, found.parameter_device) == ("cpu", "cpu")
    assert (read.offload_optimizer.device, read.offload_param.device) == ("cpu", "cpu")


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
def test_batches_are_those_that_deepspeed_makes_of_a_json(said, monkeypatch):
    from deepspeed.runtime import config

    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: 4)
    read = config.DeepSpeedConfig(dict(said))
    found = layout.from_deepspeed(said, gpus=4)
    assert found.micro_batch == read.train_micro_batch_size_per_gpu
    assert found.accumulation == read.gradient_accumulation_steps
    # what is given beside the JSON goes before it
    given = layout.from_deepspeed(said, gpus=4, micro_batch=3, accumulation=5)
    assert (given.micro_batch, given.accumulation) == (3, 5)


def test_systems_that_a_host_refuses_are_not_planned():
    offload, narrow = rungs()["COAT, offload"], rungs()["COAT, smallest, recomputed attention"]
    for system, spread, goes in (
        (offload, Layout(stage=1), True),
        (offload, Layout(stage=0), False),
        (offload, Layout(host="megatron"), False),
        (narrow, Layout(stage=1), True),
        (narrow, Layout(stage=0), False),
        (narrow, Layout(stage=1, optimizer_device="cpu"), False),
        (narrow, Layout(host="megatron"), False),
    ):
        found = [choice.system for choice in advice.compare(SMALL, spread, [system], COUNTING)]
        assert found == ([system] if goes else []), (system.name, spread)


@pytest.mark.parametrize(
    "block",
    [{"optimizer": {"enabled": False}}, {"activations": False}, {"optimizer": {"keep_fp32": ["a", "b"]}}],
)
def test_a_systems_keys_make_its_block_again(block):
    system = coat("any", block)
    assert CoatConfig.from_dict(json.loads(json.dumps(system.block()))["coat"]) == system.coat


def test_auto_is_filled_in_as_trainer_does(tmp_path):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    keys = "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"
    config = {"zero_optimization": {"stage": 3} | dict.fromkeys(keys, "auto")}
    filled_in = HfTrainerDeepSpeedConfig(config)
    model = SimpleNamespace(config=transformers.LlamaConfig(hidden_size=992, num_attention_heads=31))
    filled_in.trainer_config_finalize(transformers.TrainingArguments(tmp_path, use_cpu=True), model, 1)
    zero, found = filled_in.config["zero_optimization"], layout.from_deepspeed(config, 992)
    assert [found.reduce_bucket, found.prefetch, found.limits.persistence] == [zero[key] for key in keys]


def test_a_block_says_what_is_planned():
    block = {"enabled": True, "optimizer": {"enabled": False}, "checkpointing": {"compress": True}}
    found = configured({"coat": block}, Layout())
    assert (found.layers, found.optimizer, found.recompute) == ("coat", "adamw", "full")
    for key in ("bf16", "bfloat16"):
        block = {"enabled": True, "activations": False}
        found = configured({"coat": block, key: {"bf16_master_weights_and_grads": True}}, Layout())
        assert (found.layers, found.optimizer, found.recompute) == ("bf16", "coat", "none")
        assert found.bf16_masters
    # as DeepSpeed has it where gradients are added up in FP32
    config = {"coat": {"enabled": True}, "bf16": {"bf16_master_weights_and_grads": True}}
    smallest = rungs()["COAT, smallest, recomputed attention"]
    for stage, keeps in ((1, False), (2, True), (3, True)):
        spread = Layout(stage=stage, fp32_gradients=True)
        assert configured(config, spread).bf16_masters == advice.goes_with(smallest, spread) == keeps
    # layers stay as they are
    found = configured({"coat": {"enabled": True}, "fp16": {"enabled": True}}, Layout())
    assert (found.layers, found.optimizer) == ("bf16", "coat")


def test_modules_of_this_room_import_no_host():
    text = "".join(path.read_text() for path in Path(gathers.__file__).parent.glob("*.py"))
    assert "import deepspeed" not in text and "import megatron" not in text
