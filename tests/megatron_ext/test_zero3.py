"""COAT layers under ZeRO-3 that are not units, so that hooks run between their modules, in two processes."""

import pytest
import torch
import torch.distributed as dist

from tests.util import run_distributed

S, B, VOCAB, LAYERS = 16, 2, 64, 2
# of this model, only norms stay gathered
ZERO3 = {"stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 0}


def _model(activations):
    from coat_ds import CoatConfig
    from megatron_ext.layer_specs import coat_layer_spec
    from megatron_ext.model import ModelShape, build_gpt

    coat = CoatConfig.from_dict({"enabled": True, "activations": activations})
    shape = ModelShape(LAYERS, 64, 128, 4, 2)
    return build_gpt(
        shape, coat_layer_spec, seq_length=S, vocab_size=VOCAB, activations=coat.activations, bf16=True
    )


def _engine(model, stage):
    import deepspeed

    from megatron_ext import mpu

    config = {
        "train_micro_batch_size_per_gpu": B,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **(ZERO3 if stage == 3 else {})},
        "coat": {"enabled": True, "zero3_layer_units": False},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, mpu=mpu, config=config)[0]


def _forward(engine):
    """The loss of this rank's tokens, and the bytes that the whole model saves for backward."""
    kept = {}

    def pack(x):
        # weights themselves do not count: ZeRO-3 releases them
        if not isinstance(x, torch.nn.Parameter):
            storage = x.untyped_storage()
            kept[storage.data_ptr()] = storage
        return x if x.is_leaf else x.detach()

    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, VOCAB, (B, S), generator=generator)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = engine(tokens, torch.arange(S).expand(B, S), None, labels=tokens).mean()
    return loss, sum(storage.nbytes() for storage in kept.values())


def _hooked(loss) -> set[torch.nn.Module]:
    """Modules for which DeepSpeed has added nodes to the graph of `loss`."""
    found, seen, todo = set(), set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "BackwardFunction" in type(node).__name__ and "Module" in type(node).__name__:
            found.add(node.module)
        todo += [following for following, _ in node.next_functions]
    return found


def _worker():
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.utils import safe_get_full_grad

    from megatron_ext import cpu
    from megatron_ext.model import initialize_model_parallel

    cpu.enable()
    dist.init_process_group("gloo")
    initialize_model_parallel()
    result = {}
    for stage, kind in ((1, "bf16"), (3, "bf16"), (1, "sqrt8"), (3, "sqrt8")):
        torch.manual_seed(0)
        engine = _engine(_model({"attention_format": kind}), stage)
        names = {module: name for name, module in engine.module.named_modules()}
        steps = []
        for _ in range(3):
            loss, kept = _forward(engine)
            hooked = {names[module] for module in _hooked(loss)}
            engine.backward(loss)
            grads = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
            released = {
                name
                for name, p in engine.module.named_parameters()
                if getattr(p, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE
            }
            engine.step()
            steps.append({"loss": loss.item(), "kept": kept, "hooked": hooked, "released": released})
            steps[-1]["grads"] = {name: grad.float().clone() for name, grad in grads.items()}
        result[stage, kind] = steps
        result["weighty"] = {
            name for name, module in engine.module.named_modules() if list(module.parameters(recurse=False))
        }
        result["matrices"] = {
            name for name, p in engine.module.named_parameters() if getattr(p, "ds_numel", p.numel()) > 100
        }
        engine.destroy()
    model = _model({})
    model.embedding.requires_grad_(False)
    # the output of a frozen embedding needs no gradient: from the first layer's output on
    engine = _engine(model, 3)
    result["frozen"] = {type(module).__name__ for module in _hooked(_forward(engine)[0])}
    return result


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(_worker, 2)


@pytest.mark.parametrize("kind", ["bf16", "sqrt8"])
def test_layers_keep_as_much_as_under_stage_1(ranks, kind):
    for rank in ranks:
        for one, three in zip(rank[1, kind], rank[3, kind], strict=True):
            assert one["kept"] == three["kept"]


@pytest.mark.parametrize("kind", ["bf16", "sqrt8"])
def test_gradients_are_those_of_stage_1(ranks, kind):
    """Equal to the bit: BF16 sums of two ranks have one order, and the mean of two is exact."""
    for rank in ranks:
        one, three = rank[1, kind][0], rank[3, kind][0]
        assert one["loss"] == three["loss"]
        assert one["grads"].keys() == three["grads"].keys() >= rank["matrices"]
        for name, grad in one["grads"].items():
            assert grad.count_nonzero() and grad.equal(three["grads"][name]), name


def test_only_modules_with_weights_have_nodes(ranks):
    for rank in ranks:
        for step in rank[3, "bf16"]:
            assert step["hooked"] == rank["weighty"]
            # until DeepSpeed has recorded the order of modules, it also releases norms
            assert step["released"] >= rank["matrices"]
        # recomputed forwards rely on all of these
        assert {"CoatTransformerLayer", "CoatMLP", "CoatNorm", "GPTModel"} <= rank["frozen"]
