"""The groups that DeepSpeed reads from `mpu`, in two processes: as tensor-parallel and as data-parallel
ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext import mpu
from megatron_ext.layer_specs import sdpa_layer_spec
from megatron_ext.model import ModelShape, build_gpt
from megatron_ext.mpu import sum_shared_gradients
from tests.megatron_ext.layers import loss_of, random_tokens
from tests.megatron_ext.ranks import join
from tests.util import run_distributed

S, B, VOCAB = 16, 2, 64


def _loss(model):
    return loss_of(model, random_tokens(B, S, VOCAB))


def _shared_gradients():
    """The gradients of parameters that each rank computes for a part of the data. Autograd returns one tensor
    as the gradient of two of them."""
    model = torch.nn.ParameterDict({name: torch.ones(3) for name in ("a", "b", "whole", "frozen")})
    for name in ("a", "b", "frozen"):
        model[name].sequence_parallel = True
    model["frozen"].requires_grad_(False)
    names = sum_shared_gradients(model)
    both = (model["a"] + model["b"]) * torch.ones(3)
    (both + 2 * model["whole"] + model["frozen"]).sum().backward()
    return names, {name: p.grad.tolist() for name, p in model.items() if p.requires_grad}


def _worker():
    import deepspeed

    shape = ModelShape(1, 32, 48, 4, 2)
    result = {}
    for tp in (1, 2):
        join(tp)
        model = build_gpt(shape, sdpa_layer_spec, seq_length=S, vocab_size=VOCAB, bf16=False)
        found = {name: getattr(mpu, name)() for name in dir(mpu) if name.startswith("get_")}
        for name, group in found.items():
            if name.endswith("_group"):
                found[name] = dist.get_process_group_ranks(group)
        if tp == 1:
            _loss(model).backward()
            # this rank has the whole model
            found["exact_norm"] = math.sqrt(
                sum(p.grad.double().square().sum().item() for p in model.parameters())
            )
            model.zero_grad()
        config = {
            "train_micro_batch_size_per_gpu": B,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
        }
        # two ranks hold copies of the norms' weights, which count once
        adam = {"type": "AdamW", "params": {"lr": 1e-3}}
        engine, *_ = deepspeed.initialize(
            model=build_gpt(shape, sdpa_layer_spec, seq_length=S, vocab_size=VOCAB, bf16=False),
            mpu=mpu,
            config={**config, "optimizer": adam, "coat": {"enabled": True}},
        )
        engine.backward(_loss(engine))
        engine.step()
        found["coat_norm"] = float(engine.get_global_grad_norm())
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), mpu=mpu, config=config
        )
        losses = []
        for _ in range(2):
            loss = _loss(engine)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            found.setdefault("norm", float(engine.get_global_grad_norm()))
        found["shared"] = _shared_gradients()
        result[tp] = found | {"losses": losses, "dp": engine.dp_world_size, "mp": engine.mp_world_size}
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    result["context"] = (mpu.get_data_parallel_group_ranks(), mpu.get_model_parallel_world_size())
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    names = ("model", "pipeline_model", "tensor_model")
    result["pipeline"] = [
        getattr(mpu, f"get_{name}_parallel_{what}")() for name in names for what in ("rank", "world_size")
    ]
    return result


def test_mpu_gives_deepspeed_the_groups_of_megatron():
    ranks = run_distributed(_worker, 2)
    for rank, result in enumerate(ranks):
        one, two = result[1], result[2]
        assert result["pipeline"] == [rank, 2, rank, 2, 0, 1]
        assert one["shared"] == ([], {"a": [1.0] * 3, "b": [1.0] * 3, "whole": [2.0] * 3})
        assert two["shared"] == (["a", "b"], {"a": [2.0] * 3, "b": [2.0] * 3, "whole": [2.0] * 3})
        # context-parallel ranks hold the same weights, so DeepSpeed treats them as data-parallel ranks
        assert result["context"] == ([0, 1], 1)
        assert (one["dp"], one["mp"]) == (2, 1) and (two["dp"], two["mp"]) == (1, 2)
        for found, dp, mp in ((one, 2, 1), (two, 1, 2)):
            assert found["get_data_parallel_world_size"] == dp
            assert found["get_data_parallel_rank"] == (rank if dp == 2 else 0)
            assert found["get_data_parallel_group"] == found["get_data_parallel_group_ranks"]
            assert found["get_data_parallel_group"] == ([0, 1] if dp == 2 else [rank])
            for name in ("model", "tensor_model"):
                assert found[f"get_{name}_parallel_world_size"] == mp
                assert found[f"get_{name}_parallel_rank"] == (rank if mp == 2 else 0)
                assert found[f"get_{name}_parallel_group"] == ([0, 1] if mp == 2 else [rank])
            assert found["get_tensor_model_parallel_src_rank"] == (0 if mp == 2 else rank)
            assert found["get_pipeline_model_parallel_world_size"] == 1
            assert found["get_pipeline_model_parallel_rank"] == 0
            assert found["get_pipeline_model_parallel_group"] == [rank]
        # one model, one batch, FP32: the norm over both groups is that of the whole model, up to the order of
        # sums of at most S * B * VOCAB terms, each rounded to 2^-24
        bound = (S * B * VOCAB) ** 0.5 * 2**-24
        for name in ("norm", "coat_norm"):
            assert one[name] == pytest.approx(one["exact_norm"], rel=bound)
            assert two[name] == pytest.approx(one["exact_norm"], rel=bound)
        assert two["losses"][0] == pytest.approx(one["losses"][0], rel=bound)
        # the step is the same
        assert (
            two["losses"][1] == pytest.approx(one["losses"][1], rel=1e-3)
            and one["losses"][1] < one["losses"][0]
        )


def test_mpu_has_no_names_that_mislead_deepspeed():
    assert not hasattr(mpu, "initialize_sequence_parallel")
    assert not hasattr(mpu, "get_sequence_parallel_world_size")


def test_sum_shared_gradients_refuses_expert_parallelism():
    model = torch.nn.ParameterDict({"expert": torch.ones(3)})
    # Megatron marks parameters that ranks do not share in this way
    model["expert"].allreduce = False
    with pytest.raises(
        ValueError, match="expert_model_parallel_size: expected 1 under DeepSpeed.*average expert"
    ):
        sum_shared_gradients(model)
