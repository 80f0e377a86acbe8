"""Experts of transformers train as in BF16 under ZeRO 1 and 3, FSDP2, Trainer and LoRA. ZeRO 2 takes
layers as ZeRO 1 does: tests/coat_ds/test_ways.py."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import coat_ds
from tests.coat_ds.engines import adamw, engine_of
from tests.coat_ds.layers.measures import fp8_bound, relative, run
from tests.families import FAMILIES
from tests.hosts import TEST_ALL
from tests.util import run_distributed

QWEN3 = FAMILIES["qwen3_moe"]
STEPS, MICRO_BATCHES = 3, 2
# ZeRO 1 leaves weights whole, as one process does
STAGES = (1, 3) if TEST_ALL else (3,)
STOCK = {"enabled": False}
BLOCKS = {
    "stock": STOCK,
    **{c: {"enabled": True, "activations": {"weight_cache": c}} for c in ("none", "fp8")},
}


def build():
    # all experts for each token, so that no rounding chooses others
    return QWEN3.build(num_experts_per_tok=4)


def packed(batch: dict) -> dict:
    """The batch, with two documents in each row."""
    position_ids = torch.cat([torch.arange(20), torch.arange(12)]).expand_as(batch["input_ids"])
    return batch | {"position_ids": position_ids}


def steps_of(loss_of, backward, step) -> list[float]:
    """The losses of micro-batches, which are the same on every rank and in every step."""
    losses = []
    for _ in range(STEPS):
        for micro in range(MICRO_BATCHES):
            loss = loss_of(QWEN3.batch(seed=micro, tokens=32))
            backward(loss)
            losses.append(loss.item())
            step(micro)
    return losses


def zero(stage: int, block: dict) -> list[float]:
    # experts are gathered and released
    engine = engine_of(
        build(), stage, block, optimizer=adamw(2e-3), zero={"stage3_param_persistence_threshold": 100},
        train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=MICRO_BATCHES,
    )  # fmt: skip
    if block is not STOCK:
        assert "10 of 11 linear layers in FP8" in str(engine.coat)
    form = packed if stage == 3 else dict
    return steps_of(lambda batch: engine(**form(batch)).loss, engine.backward, lambda _: engine.step())


def fsdp2(block: dict) -> list[float]:
    model = build()
    if block is not STOCK:
        coat_ds.convert(model, block["activations"])
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    kind = torch.optim.AdamW if block is STOCK else coat_ds.CoatAdamW
    optimizer = kind(model.parameters(), lr=2e-3)

    def step(micro: int) -> None:
        if micro == MICRO_BATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()

    return steps_of(lambda b: model(**b).loss, lambda loss: (loss / MICRO_BATCHES).backward(), step)


def ranks() -> dict:
    """By way and block: the losses."""
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.init_distributed("gloo")
    ways = {f"ZeRO-{stage}": lambda block, stage=stage: zero(stage, block) for stage in STAGES}
    ways["FSDP2"] = fsdp2
    return {way: {name: train(block) for name, block in BLOCKS.items()} for way, train in ways.items()}


@pytest.fixture(scope="module")
def two():
    return run_distributed(ranks, 2)


@pytest.mark.parametrize("way", [*(f"ZeRO-{stage}" for stage in STAGES), "FSDP2"])
def test_experts_train_as_bf16_with_and_without_cached_weights(two, way):
    for rank in two:
        stock, *ours = rank[way].values()
        # of the first micro-batch
        fall = stock[0] - stock[-MICRO_BATCHES]
        assert fall > 0.05 * stock[0]
        # an operand is off by at most 2^-4 of itself in E4M3, the loss by less of its fall
        for losses in ours:
            assert losses != stock and losses == pytest.approx(stock, abs=2**-4 * fall)
        # a copy holds the codes that each pass would find
        assert ours[0] == ours[1]


def test_experts_under_trainer_are_saved_by_their_stock_names(tmp_path):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    def names(folder):
        with safe_open(folder / "model.safetensors", "pt") as file:
            return set(file.keys())

    batches = [{n: v[0] for n, v in QWEN3.batch(seed=i, rows=1, tokens=32).items()} for i in (0, 1)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        bf16=True,
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    losses = []
    for converts in (False, True):
        model = build()
        if converts:
            coat_ds.convert(model)
        trainer = Trainer(model=model, args=arguments, train_dataset=batches)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    stock, ours = losses
    fall = stock[0] - stock[-1]
    assert fall > 0.05 * stock[0] and ours != stock and ours == pytest.approx(stock, abs=2**-4 * fall)
    trainer.save_model(tmp_path / "saved")
    build().save_pretrained(tmp_path / "stock")
    assert names(tmp_path / "saved") == names(tmp_path / "stock")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        assert p.equal(q)


@pytest.mark.parametrize("first", ["convert", "PEFT"])
def test_experts_with_lora(first):
    """By PEFT's `target_parameters`, which adds an adapter to the weights of all experts in each forward."""
    peft = pytest.importorskip("peft")

    def adapted(model):
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(
            r=8, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False
        )
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    batch = QWEN3.batch(tokens=32)
    loss, expected = run(adapted(build()), batch)
    if first == "convert":
        model = adapted(coat_ds.convert(build(), {"weight_cache": "fp8"}))
    else:
        model = coat_ds.convert(adapted(build()), {"weight_cache": "fp8"})
    for scale in (1, 0.5):
        found_loss, found = run(model, batch)
        assert len(found) == 2 * 2 * 3 and abs(found_loss - loss) < 2**-8 * loss
        # a layer has 4 linear layers of attention and 2 of experts
        if scale == 1:
            assert 2**-7 < relative(found, expected) < fp8_bound(12)
        # adapters that have changed count at once
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.zero_()
    assert found_loss != pytest.approx(loss, rel=1e-6)
    merged = coat_ds.unconvert(model.merge_and_unload())
    assert {n for n, _ in merged.named_parameters()} == {n for n, _ in build().named_parameters()}
    # adapters of zeros leave the weights
    assert all(p.equal(q) for p, q in zip(merged.parameters(), build().parameters(), strict=True))
