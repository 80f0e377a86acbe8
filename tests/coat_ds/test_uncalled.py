"""Layers beneath adapters that other code computes, as Axolotl's kernels do: a warning is logged."""

import logging
import types

import pytest
import torch

import coat_ds
from tests.util import run_distributed

CONFIG = {
    "train_batch_size": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "coat": {"enabled": True},
}


def by_itself(self, x):
    """Llama's feed-forward that reads the weights, and calls no layer for them."""
    gate, up, down = (getattr(self, f"{name}_proj").base_layer.weight for name in ("gate", "up", "down"))
    return (self.act_fn(x @ gate.T) * (x @ up.T)) @ down.T


def by_itself_without_adapters(self, x):
    gate, up, down = (getattr(self, f"{name}_proj").weight for name in ("gate", "up", "down"))
    return (self.act_fn(x @ gate.T) * (x @ up.T)) @ down.T


def work():
    import deepspeed
    from peft import LoraConfig, get_peft_model

    from tests.coat_ds.ways import VOCAB, llama
    from tests.util import listening

    deepspeed.init_distributed("gloo")
    coat_ds.install()
    found = {}
    for name in ("stock", "replaced", "evaluated first", "without adapters", "fused without adapters"):
        model = llama()
        layers = model.model.layers
        if not name.endswith("without adapters"):
            model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        if name in ("replaced", "evaluated first"):
            for layer in layers:
                layer.mlp.forward = types.MethodType(by_itself, layer.mlp)
        with listening(logging.WARNING) as lines:
            engine = deepspeed.initialize(model=model, config=CONFIG)[0]
            if name == "fused without adapters":
                # not before, or its layers were not converted
                for layer in layers:
                    layer.mlp.forward = types.MethodType(by_itself_without_adapters, layer.mlp)
            ids = torch.arange(16).remainder(VOCAB).view(1, -1)
            if name == "evaluated first":
                engine.eval()
                with torch.no_grad():
                    engine(input_ids=ids)
                engine.train()
            for _ in range(2):
                engine(input_ids=ids, labels=ids)
            engine.destroy()
        hooks = sum(len(m._forward_pre_hooks) for n, m in model.named_modules() if n.endswith("base_layer"))
        found[name] = [line for line in lines if "the first forward called" in line], hooks
    return found


def test_layers_that_are_not_called_are_named_once():
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    (found,) = run_distributed(work, 1)
    assert found["stock"] == found["without adapters"] == found["fused without adapters"] == ([], 0)
    for name in ("replaced", "evaluated first"):
        (line,), hooks = found[name]
        assert (
            "called 8 of 14 converted linear layers with adapters" in line
            and "mlp.gate_proj.base_layer" in line
            # three of six
            and "layers.0.mlp.down_proj.base_layer, ...): kernels" in line
        )
        assert hooks == 0
