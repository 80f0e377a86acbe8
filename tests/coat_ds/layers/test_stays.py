"""Heads, and parts that choose something discrete, are not converted."""

import pytest
import torch
import transformers
from torch import nn

import coat_ds


def linears_left(name: str, **fields) -> set[str]:
    """The linear layers of a model of transformers, of this class and config, that are not converted."""
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls._from_config(cls.config_class(**fields), dtype=torch.bfloat16)
    taken = set(coat_ds.conversion_of(coat_ds.convert(model)).converted["linear"])
    return {n for n, m in model.named_modules() if isinstance(m, nn.Linear)} - taken


LAYER = {"num_hidden_layers": 1}
SEQUENCES = {"encoder_layers": 1, "decoder_layers": 1}

CLASSIFICATION = {"classification_head.dense", "classification_head.out_proj"}
INDEXER = {f"model.layers.0.self_attn.indexer.{n}" for n in ("wq_b", "wk", "weights_proj")}


@pytest.mark.parametrize(
    "name, fields, left",
    [
        ("RobertaForMaskedLM", LAYER, {"lm_head.dense", "lm_head.decoder"}),
        ("ElectraForMaskedLM", LAYER, {"generator_predictions.dense", "generator_lm_head"}),
        ("BartForSequenceClassification", SEQUENCES, CLASSIFICATION),
        ("T5ForSequenceClassification", {"num_layers": 1}, CLASSIFICATION),
        ("CLIPModel", {}, {"visual_projection", "text_projection"}),
        ("SiglipTextModel", LAYER, {"head"}),
        ("WhisperForAudioClassification", {**SEQUENCES, "num_labels": 64}, {"projector", "classifier"}),
        ("Wav2Vec2ForPreTraining", LAYER, {"quantizer.weight_proj", "project_hid", "project_q"}),
        ("JetMoeForCausalLM", {**LAYER, "num_local_experts": 32}, {"model.layers.0.mlp.router.layer"}),
        ("DogeForCausalLM", {**LAYER, "is_moe": True}, {"model.layers.0.mlp.router_gate"}),
        ("ZayaForCausalLM", LAYER, {"model.layers.0.mlp.gate.router_mlp.fc1"}),
        ("DeepseekV32ForCausalLM", LAYER, INDEXER),
    ],
)
def test_convert_leaves_heads_routers_and_indexers(name, fields, left):
    assert left <= linears_left(name, **fields)


@pytest.mark.parametrize(
    "name",
    [
        "CsmForConditionalGeneration",
        pytest.param(
            "KyutaiSpeechToTextForConditionalGeneration",
            marks=pytest.mark.long("one more model with the codec of CSM"),
        ),
    ],
)
def test_convert_leaves_codecs_whole(name):
    left = linears_left(name, **LAYER)
    assert "codec_model.encoder_transformer.layers.0.self_attn.q_proj" in left | {
        n.replace("encoder.encoder_transformer", "encoder_transformer") for n in left
    }
    assert "lm_head" in left and not any("backbone" in n or n.startswith("model.") for n in left)


class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x):
        return self.a(x).topk(2).indices


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x):
        return self.a(x).round()


def test_convert_of_modules_of_no_framework():
    model = nn.ModuleDict(
        {
            "first": Chooser(),
            "audio_tokenizer": Codec(),
            "router": nn.Linear(64, 64),
            "plain": nn.Linear(64, 64),
        }
    )
    assert coat_ds.conversion_of(coat_ds.convert(model)).converted["linear"] == ["plain"]
