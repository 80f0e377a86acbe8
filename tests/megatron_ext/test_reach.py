"""The block's `activations` in layers that a script built before the engine, and the log lines about them."""

import importlib
import json
import logging
import os
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch

from coat_ds import CoatConfigError
from coat_ds.config import ActivationsConfig
from coat_ds.zero.model_layers import prepare_layers
from tests.megatron_ext.layers import loss_of, random_tokens
from tests.util import run_distributed

S, VOCAB = 32, 64
OTHER = {"backward_format": "e4m3", "saved_format": "e4m3", "attention_format": "sqrt8"}
RECOMPUTE = {"attention_format": "recompute", "weight_cache": "fp8", "fast_accumulation": "none"}
DENSE = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4}
EXPERTS = {
    **DENSE,
    "num_moe_experts": 2,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_layer_freq": [0, 1],
}


def gpt(told=None, spec=None, **sizes):
    """A model as a user's script builds it, without the block."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.layer_specs import coat_layer_spec
    from megatron_ext.layers.settings import set_activations

    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        **(sizes or DENSE),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        masked_softmax_fusion=False,
    )
    options = {"vocab_size": VOCAB, "max_sequence_length": S, "position_embedding_type": "rope"}
    model = GPTModel(config, spec or coat_layer_spec, **options).bfloat16()
    if told is not None:
        set_activations(model, ActivationsConfig(**told))
    return model


def gradients(model):
    loss = loss_of(model, random_tokens(2, S, VOCAB, 1))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def engine_of(model, **block):
    import deepspeed

    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "coat": {"enabled": True, **block},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def refused(model, **block):
    try:
        engine_of(model, **block)
    except CoatConfigError as error:
        return str(error)


def work(folder):
    warnings.simplefilter("ignore")
    import deepspeed

    from megatron_ext import cpu, layer_specs, model
    from megatron_ext.options import VARIABLE

    cpu.enable()
    deepspeed.init_distributed("gloo")
    model.initialize_model_parallel()
    lines, handler = [], logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logging.getLogger("coat_ds").addHandler(handler)
    out = {}
    for name, sizes in (("dense", DENSE), ("experts", EXPERTS)):
        for number, wanted in enumerate((OTHER, RECOMPUTE)):
            reached, default = gpt(**sizes), gpt(**sizes)
            prepare_layers(reached, ActivationsConfig(**wanted), given=True)
            # as the file of COAT_CONFIG does
            params = {"activations": ActivationsConfig(**wanted)}
            built = gpt(spec=replace(layer_specs.coat_layer_spec, params=params), **sizes)
            grads = [gradients(m) for m in (reached, built, default)]
            equal = [[torch.equal(a, b) for a, b in zip(grads[0], g, strict=True)] for g in grads[1:]]
            out[name, number] = all(equal[0]), all(equal[1])

    lines.clear()
    out["engine"] = engine_of(gpt(), activations=OTHER).coat
    out["engine"] = out["engine"].layers, str(out["engine"])
    out["lines"] = [line for line in lines if "COAT:" in line[1]]
    out["silent block"] = engine_of(gpt(OTHER)).coat.layers
    out["told the same"] = engine_of(gpt(OTHER), activations=OTHER).coat.layers
    out["told otherwise"] = refused(gpt(OTHER), activations={"saved_format": "sqrt8"})
    both = torch.nn.ModuleList([gpt(), gpt(OTHER)])
    out["told otherwise in part"] = refused(both, activations={"saved_format": "e4m3"})
    out["switched off"] = refused(gpt(), activations=False)
    path = os.path.join(folder, "coat.json")
    with open(path, "w") as file:
        json.dump({"coat": {"enabled": True, "activations": {"backward_format": "e4m3"}}}, file)
    with mock.patch.dict(os.environ, {VARIABLE: path}):
        # with it layers take the file's settings
        spec = importlib.import_module("megatron_ext.spec").coat_layer_spec
        out["file"] = refused(gpt(spec=spec), activations={"backward_format": "e5m2"})
        out["file, silent block"] = engine_of(gpt(spec=spec)).coat.layers

    with mock.patch.object(layer_specs, "coat_layer_spec", layer_specs.sdpa_layer_spec):
        lines.clear()
        out["nothing"] = engine_of(gpt()).coat.layers
        out["warned"] = [text for level, text in lines if level == "WARNING" and "coat.activations" in text]
        out["required"] = refused(gpt(), require=True)
        lines.clear()
        out["not asked for"] = engine_of(gpt(), activations=False, require=True).coat
        out["not asked for"] = str(out["not asked for"]), [text for level, text in lines if level != "INFO"]
    return out


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_distributed(work, 1, str(tmp_path_factory.mktemp("reach")))[0]


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("wanted", [0, 1])
def test_prepare_layers_equals_layers_of_the_spec(found, model, wanted):
    as_built, as_default = found[model, wanted]
    assert as_built and not as_default


def test_engine_logs_megatrons_layers(found):
    layers, said = found["engine"]
    assert layers.count("linear") == (8, 9) and layers.made == {
        "linear": {"e4m3, gradients in e4m3": 8},
        "norm": {"in 8 bits (e4m3)": 4},
        "feed_forward": {"in 8 bits (e4m3)": 2},
        "attention": {"in 8 bits (sqrt8)": 2},
    }
    assert layers.left == {"output_layer": "the model's own"}
    assert "8 of 9 linear layers in FP8 (e4m3, gradients in e4m3)" in said
    assert "1 not converted (output_layer): the model's own" in said
    # after the table of states
    level, line = found["lines"][-1]
    assert level == "INFO" and line.endswith(said)


def test_engine_without_activations_keeps_the_settings_of_layers(found):
    assert found["silent block"] == found["told the same"] == found["engine"][0]
    linears = found["file, silent block"].made["linear"]
    assert linears == {"e4m3, gradients in e4m3": 8}


@pytest.mark.parametrize(
    "case, word",
    [
        ("told otherwise", "coat.activations.backward_format: found 'e5m2'"),
        ("told otherwise in part", "backward_format: found 'e5m2', but 1.decoder"),
        ("file", "coat.json"),
        ("switched off", "coat.activations.enabled: found False"),
        ("required", "coat.activations.enabled: found True"),
    ],
)
def test_engine_refuses_other_settings_than_those_of_layers(found, case, word):
    assert word in found[case]


def test_engine_warns_without_a_layer_in_fp8(found):
    assert found["nothing"].count("linear") == (0, 9) and not found["nothing"].made
    (line,) = found["warned"]
    assert "0 of 9 linear layers in FP8" in line and '"activations" to false' in line
    said, warnings = found["not asked for"]
    assert "linear" not in said and not warnings
