"""`coat plan --fit`: what is pasted runs as it is, under Trainer and under DeepSpeed."""

import json

import pytest
import torch
import transformers
from deepspeed.runtime import config
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from coat_ds import cli
from coat_ds.plan.deepspeed_json import ACCUMULATION, MICRO_BATCH
from coat_ds.zero import deepspeed_config

# large enough that COAT is the fastest
MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "vocab_size": 1024,
}
SMALL = MODEL | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
BATCH = {MICRO_BATCH: "auto", ACCUMULATION: "auto", "train_batch_size": "auto"}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
ZERO = {"zero_optimization": {"stage": 2}}
TRAINERS = {
    "LLaMA-Factory": BATCH
    | {
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e8},
    },
    "block": BATCH
    | {"coat": {"enabled": True}, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    | {"zero_optimization": {"stage": 2}},
    "fp16 alone": BATCH | {"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}},
    "optimizer": BATCH
    | {
        "optimizer": {
            "type": "AdamW",
            "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
        }
    }
    | {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}},
}
OWN = {
    "numbers": ADAMW
    | {MICRO_BATCH: 2, ACCUMULATION: 4, "train_batch_size": 16, "bf16": {"enabled": True}}
    | ZERO,
    "fp16": ADAMW | {"fp16": {"enabled": True, "loss_scale": 0}, "zero_optimization": {"stage": 1}},
    "fp16 off": ADAMW | {"fp16": {"enabled": False}, "bf16": {"enabled": True}} | ZERO,
    "block": ADAMW | {"coat": {"enabled": True, "require": True}, "zero_optimization": {"stage": 2}},
    "no optimizer": {MICRO_BATCH: 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
}
# what COAT refuses, with the key that the message names
REFUSED = {
    "optimizer.type": {"coat": {"enabled": True}, "optimizer": {"type": "FusedAdam", "params": {"lr": 1e-3}}},
    "zero_optimization.offload_optimizer.device": ADAMW
    | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
}


def recommended(folder, capsys, base: dict | None, *more: str) -> dict:
    model = folder / "config.json"
    model.write_text(json.dumps(MODEL))
    words = ["plan", str(model), "--gpus", "2", "--fit", "60GB", "--json", *more]
    if base is not None:
        (folder / "ds.json").write_text(json.dumps(base))
        words += ["--deepspeed", str(folder / "ds.json")]
    assert cli.main(words) == 0
    return json.loads(capsys.readouterr().out)["recommended"]


def autos(values: dict, at: str = "") -> set[str]:
    """The paths of the values "auto"."""
    found = set()
    for key, value in values.items():
        if isinstance(value, dict):
            found |= autos(value, f"{at}{key}.")
        elif value == "auto":
            found.add(at + key)
    return found


@pytest.mark.parametrize("name", [*TRAINERS, None])
def test_plan_json_is_taken_by_trainer(name, tmp_path, capsys):
    base = TRAINERS.get(name)
    best = recommended(tmp_path, capsys, base, *(["--for", "trainer"] if base is None else []))
    pasted = json.loads(best["paste"])
    if base is not None:
        added = set(pasted) - set(base)
        assert autos(base) <= autos(pasted) and added <= {"coat", "bf16"}
    assert base is not None or "optimizer" not in pasted
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        bf16=True,
        use_cpu=True,
        per_device_train_batch_size=best["micro_batch"],
        gradient_accumulation_steps=1,
    )
    filled_in = HfTrainerDeepSpeedConfig(pasted)
    filled_in.trainer_config_process(arguments)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    filled_in.trainer_config_finalize(arguments, model, 100)
    config.DeepSpeedConfig(filled_in.config)
    optimizer = None if "optimizer" in pasted else torch.optim.AdamW(model.parameters())
    assert deepspeed_config.checked_config(filled_in.config, optimizer).enabled == ("coat" in pasted)
    assert "coat" in pasted


@pytest.mark.parametrize("name", OWN)
def test_plan_json_without_auto_has_the_batch_that_was_chosen(name, tmp_path, capsys, monkeypatch):
    base = OWN[name]
    best = recommended(tmp_path, capsys, base)
    pasted = json.loads(best["paste"])
    assert pasted.get("optimizer") == base.get("optimizer") and pasted[MICRO_BATCH] == best["micro_batch"]
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: 2)
    config.DeepSpeedConfig(pasted)
    assert deepspeed_config.checked_config(pasted, None).enabled
    assert pasted["bf16"]["enabled"] and ("fp16" in pasted) == (name == "fp16 off")


@pytest.mark.parametrize("key", REFUSED)
def test_plan_json_is_never_one_that_coat_refuses(key, tmp_path, capsys):
    base = ZERO | {MICRO_BATCH: 1, "bf16": {"enabled": True}, **REFUSED[key]}
    pasted = json.loads(recommended(tmp_path, capsys, base)["paste"])
    # offload to the CPU takes the place of a disk's
    assert ("coat" in pasted) == key.endswith("device") and pasted["optimizer"] == base["optimizer"]
    deepspeed_config.checked_config(pasted, None)
    words = ["plan", str(tmp_path / "config.json"), "--gpus", "2", "--fit", "60GB"]
    assert cli.main([*words, "--deepspeed", str(tmp_path / "ds.json")]) == 0
    out = capsys.readouterr().out
    assert f"not recommended: COAT, since {key}: " in out and out.count("\n> ") == 1
    (tmp_path / "ds.json").write_text(json.dumps(base | {"coat": {"enabled": True}}))
    assert cli.main([*words[:-2], "--deepspeed", str(tmp_path / "ds.json")]) == 0
    assert f"not recommended: as the JSON says, since {key}: " in capsys.readouterr().out
