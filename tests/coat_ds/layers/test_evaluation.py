"""`activations.evaluation` "stock": converted models evaluate as stock ones, and train as with "fp8"."""

import types
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import coat_ds
from tests.coat_ds.layers.measures import OF_EACH_KIND, placed, run
from tests.coat_ds.layers.parts import Net, tokens
from tests.coat_ds.ways import BLOCK, Data, engine_of, step
from tests.families import FAMILIES
from tests.util import run_distributed

LLAMA = FAMILIES["llama"]
STOCK = {"evaluation": "stock"}
BLOCKS = {"without": {"enabled": False}, "fp8": BLOCK, "stock": {**BLOCK, "activations": STOCK}}


def logits_of(model, batch, gradients=False):
    with torch.set_grad_enabled(gradients):
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits.detach()


@OF_EACH_KIND
def test_evaluation_of_a_family_is_stock(name, device):
    family = FAMILIES[name]
    batch = placed(family.batch(), device)
    stock, fp8, model = (family.build().to(device) for _ in range(3))
    coat_ds.convert(fp8)
    coat_ds.convert(model, STOCK)
    # training first: from then on it is known which outputs wait for a product
    loss, gradients = run(fp8, batch)
    again, same = run(model, batch)
    assert again == loss
    if device.type == "cpu":
        assert all(same[name].equal(gradient) for name, gradient in gradients.items())
    expected = logits_of(stock.eval(), batch)
    assert not logits_of(fp8.eval(), batch).equal(expected)
    assert logits_of(model.eval(), batch).equal(expected)
    # with gradients, or while it trains without, as in a checkpoint, it is a part of training
    assert logits_of(model, batch, gradients=True).equal(logits_of(fp8, batch, gradients=True))
    assert logits_of(model.train(), batch).equal(logits_of(fp8.train(), batch))
    assert run(model, batch)[0] == loss
    if family.generates:
        prompt = {k: v[:, :40] if k == "input_ids" else v for k, v in batch.items() if k != "labels"}
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ids = [one.eval().generate(**prompt, **options) for one in (stock, model)]
        assert ids[0].equal(ids[1])


def test_evaluation_as_stock_takes_the_stock_mask_of_a_window(device):
    family = FAMILIES["mistral"]
    batch, stock, model = placed(family.batch(), device), family.build(), family.build()
    coat_ds.convert(model.to(device), STOCK)
    expected = logits_of(stock.to(device).eval(), batch)
    assert logits_of(model.eval(), batch).equal(expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_evaluation_checkpoints_repeat_what_was_trained(reentrant):
    batch, found = LLAMA.batch(), []
    for activations in ({}, STOCK):
        model = coat_ds.convert(LLAMA.build(), activations)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found.append(run(model, batch))
    (loss, gradients), (again, same) = found
    assert loss == again and all(same[name].equal(gradient) for name, gradient in gradients.items())


def test_evaluation_under_autocast_over_fp32_weights():
    batch, models = LLAMA.batch(dtype=torch.float32), [LLAMA.build(torch.float32).eval() for _ in range(2)]
    coat_ds.convert(models[1], STOCK)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (logits_of(model, batch) for model in models)
    assert found.equal(expected)


def test_evaluation_of_a_forward_that_was_patched_before():
    model, seen, x = Net(), [], tokens()

    def patched(self, x):
        seen.append(x)
        return F.linear(x, self.weight, self.bias)

    model.up.forward = types.MethodType(patched, model.up)
    coat_ds.convert(model, STOCK).eval()
    assert "up" in coat_ds.conversion_of(model).converted["linear"]
    seen.clear()
    with torch.no_grad():
        assert model(x).equal(Net()(x))
    assert seen == [x]


@pytest.mark.long("torch traces for seconds; compiled models: test_convert.py")
def test_evaluation_of_a_compiled_model():
    stock, x = Net(norm=nn.RMSNorm(64)), tokens()
    model = torch.compile(coat_ds.convert(Net(norm=nn.RMSNorm(64)), STOCK), backend="eager")
    with torch.no_grad():
        expected = stock(x)
        # the compiler guards what the forward asks for: of one graph the other must not be taken
        trained = model(x)
        assert not trained.equal(expected)
        assert model.eval()(x).equal(expected)
        assert model.train()(x).equal(trained)


def evaluated(engine):
    ids = torch.stack([Data()[i]["input_ids"] for i in range(4)]).to(engine.device)
    with torch.no_grad():
        return engine(input_ids=ids, labels=ids).loss.item()


def by_stages():
    """Of ZeRO 1 and 3, without COAT, with "fp8" and with "stock": losses of training, and of evaluation
    before and in between."""
    warnings.simplefilter("ignore")
    found = {}
    for stage in (1, 3):
        for name, block in BLOCKS.items():
            # without the block torch's AdamW: DeepSpeed's own would be compiled
            adamw = {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "torch_adam": True}}
            engine = engine_of(stage, block, optimizer=adamw)
            engine.eval()
            first = evaluated(engine)
            engine.train()
            losses = [step(engine, i) for i in range(2)]
            engine.eval()
            then = evaluated(engine)
            engine.train()
            losses.append(step(engine, 2))
            found[stage, name] = losses, first, then
            engine.destroy()
    return found


def test_evaluation_under_deepspeed():
    for found in run_distributed(by_stages, 2):
        for stage in (1, 3):
            (losses, first, then), (again, plain, later) = (found[stage, name] for name in ("fp8", "stock"))
            assert again == losses
            assert plain == found[stage, "without"][1] != first and later != then and later < plain


def sharded():
    """In two processes, of a model under FSDP2: logits of the stock one, in FP8, and as a stock one."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found = []
    for activations in ({"enabled": False}, {}, STOCK):
        model = coat_ds.convert(LLAMA.build(), activations).eval()
        for layer in model.model.layers:
            fully_shard(layer)
        found.append(logits_of(fully_shard(model), LLAMA.batch()))
    return found


def test_evaluation_under_fsdp2():
    for stock, fp8, plain in run_distributed(sharded, 2):
        assert plain.equal(stock) and not fp8.equal(stock)
