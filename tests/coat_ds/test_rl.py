"""TRL's GRPO, which generates between its steps, with a coat block and ZeRO."""

import contextlib
import io
import warnings

import pytest

import coat_ds
from coat_ds.layers.modules.hooks import is_hooked
from tests.coat_ds.ways import BLOCK, VOCAB, arguments, host_config, llama, tokenizer
from tests.util import run_distributed

pytest.importorskip("trl")


def shares_of_short_words(completions, **_):
    return [sum(len(word) == 2 for word in text.split()) / 8 for text in completions]


def grpo(folder, stage):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    llama(pad_token_id=VOCAB - 1, eos_token_id=VOCAB - 1).save_pretrained(f"{folder}/base")
    words = tokenizer()
    words.padding_side = "left"
    run = GRPOTrainer(
        model=llama().from_pretrained(f"{folder}/base"),
        reward_funcs=shares_of_short_words,
        args=arguments(
            GRPOConfig,
            folder,
            host_config(stage, {**BLOCK}),
            beta=0.1,
            num_generations=4,
            max_completion_length=8,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" * (1 + i % 3) for i in range(16)]}),
        processing_class=words,
    )
    run.train()
    entries = [entry for entry in run.state.log_history if "loss" in entry]
    layers = run.accelerator.unwrap_model(run.model).model.layers
    return {
        "divergences": [entry["kl"] for entry in entries],
        "hooked": [type(part).__name__ for layer in layers for part in layer.modules() if is_hooked(part)],
        "coat": str(run.model_wrapped.coat),
    }


def work(folder):
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.init_distributed("gloo")
    coat_ds.install()
    with contextlib.redirect_stdout(io.StringIO()):
        return grpo(folder, 3)


def test_zero3_units_stay_behind_a_generation(tmp_path):
    """TRL takes ZeRO-3's hooks away while it generates, and puts them back. The policy is the reference until
    its first step, to the bit, as long as both run as fused blocks."""
    (found,) = run_distributed(work, 1, str(tmp_path))
    assert "ZeRO-3 gathers 2 of 2 layers whole" in found["coat"]
    assert found["hooked"] == ["LlamaDecoderLayer"] * 2
    assert found["divergences"][0] == 0 and found["divergences"][-1] > 0
