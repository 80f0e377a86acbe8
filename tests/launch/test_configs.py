"""Every file in configs/, read by the program that it is for."""

import argparse
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import TrainingArguments

from coat_ds.zero.deepspeed_config import checked_config
from coat_launch import config_path
from coat_launch.deepspeed_config import AUTO, read_deepspeed_config, set_batch_sizes
from tests.util import run_distributed

CONFIGS = Path(config_path("coat.schema.json")).parent
DEEPSPEED = {
    "ds_zero1_coat": (1, None),
    "ds_zero2_coat": (2, None),
    "ds_zero3_coat": (3, None),
    "ds_zero2_offload_coat": (2, "cpu"),
    "ds_zero3_offload_coat": (3, "cpu"),
}
# vocabulary and number of parameters of the published models; the first two are this project's own
MODELS = {
    "quickstart": (384, None),
    "125m": (32000, None),
    "1b": (128256, 1_235_814_400),
    "llama2_7b": (32000, 6_738_415_616),
    "llama2_13b": (32000, 13_015_864_320),
    "llama3_8b": (128256, 8_030_261_248),
    "llama3_70b": (128256, 70_553_706_496),
}


def test_no_file_is_left_out():
    assert {p.stem for p in CONFIGS.glob("ds_*.json")} == set(DEEPSPEED)
    assert {p.stem.removeprefix("model_") for p in CONFIGS.glob("model_*.json")} == set(MODELS)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_reads_it(name):
    from deepspeed.runtime.config import DeepSpeedConfig

    stage, device = DEEPSPEED[name]
    path = str(CONFIGS / f"{name}.json")
    args = argparse.Namespace(deepspeed_config=path, variant=None, lr=None, warmup_steps=None)
    content = read_deepspeed_config(args)
    assert set_batch_sizes(content, argparse.Namespace(micro_batch_size=None, global_batch_size=None), 1)
    assert "auto" not in json.dumps(content)
    config = DeepSpeedConfig(content)
    assert config.optimizer_params == AUTO and config.gradient_clipping == 1.0
    args.lr = 1e-4
    assert read_deepspeed_config(args)["optimizer"]["params"] == AUTO | {"lr": 1e-4}
    assert config.zero_optimization_stage == stage and config.bfloat16_config.enabled
    offload = config.zero_config.offload_optimizer
    assert (offload and offload.device) == device
    # the project reads every key of it as it is meant
    assert checked_config(content, None).optimizer.enabled


@pytest.mark.parametrize("name", DEEPSPEED)
def test_trainer_fills_in_its_own_arguments(name, tmp_path):
    """With another learning rate, batch and betas than the launch scripts."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = HfTrainerDeepSpeedConfig(str(CONFIGS / f"{name}.json"))
    given = {
        "learning_rate": 1e-5,
        "per_device_train_batch_size": 3,
        "adam_beta2": 0.99,
        "max_grad_norm": 0.5,
    }
    config.trainer_config_process(TrainingArguments(str(tmp_path), bf16=True, use_cpu=True, **given))
    assert config.mismatches == []
    params = config.config["optimizer"]["params"]
    assert params["lr"] == 1e-5 and params["betas"] == [0.9, 0.99]
    assert config.config["train_micro_batch_size_per_gpu"] == 3 and config.config["gradient_clipping"] == 0.5


def build_all() -> dict:
    """Parameters of each model, on the meta device."""
    torch.distributed.init_process_group("gloo")
    from megatron.core.models.gpt import GPTModel

    from megatron_ext import cpu, layer_specs
    from megatron_ext.model import build_gpt, initialize_model_parallel, load_shape

    cpu.enable()
    initialize_model_parallel(1)
    out = {}
    for name, (vocab, _) in MODELS.items():
        shape = load_shape(CONFIGS / f"model_{name}.json")
        # weights on "meta" cannot be moved to a device
        with torch.device("meta"), mock.patch.object(GPTModel, "to", lambda model, **_: model):
            model = build_gpt(shape, layer_specs.coat_layer_spec, seq_length=64, vocab_size=vocab)
        assert all(p.is_meta for p in model.parameters() if p.dim() > 1)
        out[name] = sum(p.numel() for p in model.parameters())
    return out


def test_models_have_the_published_sizes():
    (found,) = run_distributed(build_all, 1)
    for name, (_, published) in MODELS.items():
        assert found[name] == (published or found[name]), name
