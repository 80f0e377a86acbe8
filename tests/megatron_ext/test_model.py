"""Model shapes, GPT models with both specs, Megatron's own lookup of a spec, and checkpoints."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.spec_utils import import_module

from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.model import ModelShape, build_gpt, initialize_model_parallel, load_shape

pytestmark = pytest.mark.usefixtures("megatron")

CONFIGS = Path(__file__).parents[2] / "configs"
SHAPE = load_shape(CONFIGS / "model_quickstart.json")
S, VOCAB = 64, 512


def build(spec, **kwargs):
    return build_gpt(SHAPE, spec, seq_length=S, vocab_size=VOCAB, **kwargs)


def parameters_of_a_layer(shape: ModelShape) -> int:
    h, kv = shape.hidden_size, shape.hidden_size // shape.num_attention_heads * shape.num_query_groups
    return 2 * h + h * (h + 2 * kv) + h * h + 3 * h * shape.ffn_hidden_size


def test_load_shape_of_the_configs():
    assert SHAPE == ModelShape(4, 128, 352, 4, 2)
    shape = load_shape(CONFIGS / "model_125m.json")
    assert shape == ModelShape(12, 768, 2048, 12, 4)
    # the name "125M" counts tied embeddings of GPT-2's size, 50304 x 768; here: the layers and one such
    # matrix
    assert 110e6 < 12 * parameters_of_a_layer(shape) + 50304 * 768 < 140e6
    for path in CONFIGS.glob("model_*.json"):
        # FP8 GEMMs on a GPU need multiples of 16
        shape = load_shape(path)
        kv = shape.hidden_size // shape.num_attention_heads * shape.num_query_groups
        assert not any(
            size % 16 for size in (shape.hidden_size, shape.ffn_hidden_size, shape.hidden_size + 2 * kv)
        )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layer": 4}, "unexpected keyword argument 'num_layer'"),
        ({"num_layers": None}, "missing 1 required positional argument: 'num_layers'"),
        ({"num_layers": 4.0}, "num_layers: expected int, found 4.0"),
        ({"num_layers": True}, "num_layers: expected int, found True"),
        ({"num_layers": 0}, "num_layers: expected a number above 0, found 0"),
        ({"layernorm_epsilon": "1e-5"}, "layernorm_epsilon: expected float, found '1e-5'"),
        ({"layernorm_epsilon": float("nan")}, "layernorm_epsilon: expected a number above 0, found nan"),
        ({"hidden_size": 100}, "hidden_size: 100 does not split into 8 heads .num_attention_heads."),
        ({"num_query_groups": 3}, "num_query_groups: 3 does not divide num_attention_heads .8."),
        ("{", "not a JSON file"),
        ("[1]", "expected a JSON object, found list"),
    ],
    ids=str,
)
def test_load_shape_errors_name_file_and_key(tmp_path, change, text):
    path = tmp_path / "shape.json"
    if isinstance(change, dict):
        values = dataclasses.asdict(ModelShape(4, 128, 352, 8, 2)) | change
        change = json.dumps({key: value for key, value in values.items() if value is not None})
    path.write_text(change)
    with pytest.raises(ValueError, match=f"{path}: .*{text}"):
        load_shape(path)


def test_build_gpt_makes_the_model_of_the_shape(device):
    model = build(coat_layer_spec)
    assert all(p.dtype == torch.bfloat16 and p.device.type == device.type for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    assert count == 4 * parameters_of_a_layer(SHAPE) + 2 * VOCAB * 128 + 128
    tied = build_gpt(
        dataclasses.replace(SHAPE, untie_embeddings_and_output_weights=False),
        coat_layer_spec,
        seq_length=S,
        vocab_size=VOCAB,
        bf16=False,
    )
    assert sum(p.numel() for p in tied.parameters()) == count - VOCAB * 128
    assert all(p.dtype == torch.float32 for p in tied.parameters())
    assert model.decoder.layers[0].input_layernorm.eps == model.decoder.final_layernorm.eps == 1e-5
    changed = build_gpt(
        dataclasses.replace(SHAPE, layernorm_epsilon=1e-3, rotary_base=500),
        coat_layer_spec,
        seq_length=S,
        vocab_size=VOCAB,
    )
    assert changed.decoder.layers[0].input_layernorm.eps == changed.decoder.final_layernorm.eps == 1e-3
    # the slowest of the 16 rotations of a head of 32 channels turns by base^(-30 / 32)
    for gpt, base in ((model, 10000), (changed, 500)):
        assert gpt.rotary_pos_emb.inv_freq[-1].item() == pytest.approx(base ** (-30 / 32), rel=2**-20)
    other = build(coat_layer_spec, seed=2)
    assert not torch.equal(other.output_layer.weight, model.output_layer.weight)


@pytest.mark.parametrize(
    "kind", ["tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"]
)
def test_initialize_model_parallel_refuses_another_size(kind):
    name = f"{kind}_parallel_size"
    with pytest.raises(ValueError, match=f"{name}: expected 2, .* initialised with 1"):
        initialize_model_parallel(**{name: 2})


@pytest.mark.parametrize("name", ["coat_layer_spec", "sdpa_layer_spec"])
def test_specs_are_found_by_name(name):
    # the code of `--spec`
    spec = import_module(["megatron_ext.layer_specs", name])
    layers = build(spec).decoder.layers
    assert len(layers) == SHAPE.num_layers and all(type(layer) is spec.module for layer in layers)
    assert [layer.layer_number for layer in layers] == [1, 2, 3, 4]


def test_layer_specs_without_megatron_raise_no_import_error(monkeypatch):
    # Megatron 0.16's import_module swallows an ImportError and returns None
    monkeypatch.delitem(sys.modules, "megatron_ext.layer_specs")
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt.gpt_layer_specs", None)
    with pytest.raises(RuntimeError, match="needs megatron-core 0.16.1 or newer"):
        import_module(["megatron_ext.layer_specs", "coat_layer_spec"])
