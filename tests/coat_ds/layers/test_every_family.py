"""Every language model of the installed transformers, built small, converted and compared with stock.

In "exact" arithmetic every FP8 and 8-bit code is replaced by one in FP32, which loses nothing. A difference
that is left is one of structure: another order of gate and up, an angle, a mask, a scale. So a release of
transformers is answered by one run:

    COAT_TEST_ALL=1 python -m pytest tests/coat_ds/layers/test_every_family.py -rs
"""

import inspect

import pytest
import torch

import coat_ds
from coat_ds import plan
from coat_ds.layers.modules.decoder_layer import Fp8DecoderLayer
from coat_ds.plan.from_transformers import TOLERANCE
from coat_ds.plan.read import meta_model
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.groups.reference import GROUP_FORMATS
from tests.coat_ds.layers.measures import relative
from tests.util import EXACT

transformers = pytest.importorskip("transformers")
from transformers.models.auto import modeling_auto as auto  # noqa: E402

# names alone: to import every family takes half a minute
MAPPINGS = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
VOCABULARY, TOKENS = 128, 24
# small values, and the names of the fields that get them
SMALL = {
    VOCABULARY: "vocab_size max_position_embeddings n_positions",
    96: "intermediate_size ffn_hidden_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim",
    64: "hidden_size d_model n_embd embed_dim dim n_embed",
    48: "moe_intermediate_size shared_expert_intermediate_size",
    16: "head_dim d_kv",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_experts num_local_experts n_routed_experts",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers "
    "num_key_value_heads num_experts_per_tok",
}
SMALL = {name: value for value, names in SMALL.items() for name in names.split()}
# fields of dropout, which have many names
ZERO = ("dropout", "drop_rate", "pdrop", "layerdrop", "jitter", "drop_path")


def families() -> dict[str, str]:
    """The type of each model class, by the name of the class."""
    found = {}
    for mapping in MAPPINGS:
        for kind, names in mapping.items():
            found |= dict.fromkeys(names if isinstance(names, tuple) else (names,), kind)
    return dict(sorted(found.items()))


def shrink(config) -> None:
    """Makes a config and those inside it small, in place."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value)
        elif isinstance(value, bool):
            continue
        elif any(part in name for part in ZERO) and isinstance(value, int | float):
            setattr(config, name, 0.0)
        elif name in SMALL and isinstance(value, int):
            setattr(config, name, min(value, SMALL[name]))
        elif name.endswith("token_id") and isinstance(value, int):
            setattr(config, name, min(value, VOCABULARY - 1))
    # a layer of each kind
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = vars(config).get(name)
        if isinstance(kinds, list):
            kinds = list(dict.fromkeys(kinds))
            config.num_hidden_layers = max(2, len(kinds))
            setattr(config, name, (kinds * 2)[: config.num_hidden_layers])
    config.use_cache = False


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config = transformers.CONFIG_MAPPING[families()[name]]()
    shrink(config)
    try:
        model = model_class._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except ValueError:
        # no SDPA
        model = model_class._from_config(config, dtype=torch.float32, attn_implementation="eager")
    for p in model.parameters():
        # biases and norms that are not the identity
        p.data.add_(0.02 * torch.randn_like(p))
    return model.train()


def batch_of(model: torch.nn.Module) -> dict:
    ids = torch.randint(10, VOCABULARY - 10, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    takes = inspect.signature(model.forward).parameters
    batch = {"input_ids": ids}
    if "labels" in takes:
        batch["labels"] = ids.clone()
    if "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = ids.clone()
    return batch


def run(model, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(2)
    out = model(**batch)
    logits = out.logits
    logits.float().square().mean().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def exact(monkeypatch):
    """FP8 formats, and the saved format of the same name, that hold FP32 values."""
    monkeypatch.setitem(GROUP_FORMATS, "e4m3", EXACT)
    formats = (E4M3, E5M2)
    before = [form.dtype for form in formats]
    for form in formats:
        object.__setattr__(form, "dtype", torch.float32)
    yield
    for form, dtype in zip(formats, before, strict=True):
        object.__setattr__(form, "dtype", dtype)


# layers whose model gives them no position_embeddings, so that they run unfused
WITHOUT_ANGLES = {"LaraMiniForCausalLM": 1}


@pytest.mark.long("each family of transformers, a quarter of an hour")
@pytest.mark.parametrize("name", families())
def test_every_family_converted_equals_stock(name, exact, monkeypatch):
    try:
        stock = build(name)
        batch = batch_of(stock)
        logits, gradients = run(stock, batch)
    except Exception as error:
        # sizes that this class checks, inputs other than text, a package that is not installed
        pytest.skip(f"does not run small: {type(error).__name__}: {str(error)[:80]}")
    stock.zero_grad()
    taken, run_fused = [], Fp8DecoderLayer.run_fused
    monkeypatch.setattr(Fp8DecoderLayer, "run_fused", lambda *a: taken.append(1) or run_fused(*a))
    # not a copy: some models keep a state between calls
    model = build(name)
    model.load_state_dict(stock.state_dict())
    coat_ds.convert(model, {"saved_format": "e4m3"})
    done = coat_ds.conversion_of(model)
    if not done.converted["linear"]:
        pytest.skip(f"nothing is converted: {sorted(set(done.left.values()))[:3]}")
    found_logits, found = run(model, batch)
    # sums of a few hundred terms in other orders, through some twenty layers. Grouped experts multiply in
    # BF16, which rounds each of three operands by up to 2^-9
    bf16 = any(name.endswith("experts") for name in done.converted["feed_forward"])
    assert relative({"logits": found_logits}, {"logits": logits}) < (2**-6 if bf16 else 1e-4)
    assert found.keys() == gradients.keys()
    assert relative(found, gradients) < (2**-5 if bf16 else 1e-3)
    # a layer that is counted as one that can run as fused blocks does
    counted = done.converted["layer"] + done.converted["attention_block"]
    assert len(taken) >= len(counted) - WITHOUT_ANGLES.get(name, 0)


@pytest.mark.long("each family of transformers, some minutes")
@pytest.mark.parametrize("name", families())
def test_every_family_is_planned_with_its_parameters(name):
    """Of the default config. Families that are not planned are refused with the reason."""
    try:
        model = meta_model({"model_type": families()[name], "architectures": [name]})
        found = plan.from_module(model)
    except plan.PlanError as error:
        pytest.skip(str(error)[:120])
    exact = sum(p.numel() for p in model.parameters())
    assert abs(found.parameters - exact) <= TOLERANCE * exact
