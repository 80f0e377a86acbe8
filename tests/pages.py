"""The README, and the names that its Python uses."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def block(language: str, page: str = README) -> str:
    """The only code block in `language` of a page."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)
    return found


def names_of_examples(folder: str) -> dict:
    """The names that the Python of the pages uses without definition: a tiny Llama, Trainer and its
    arguments, data."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    import coat_ds

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    args = TrainingArguments(
        output_dir=folder, max_steps=2, save_strategy="no", bf16=True, use_cpu=True, report_to=[]
    )
    ids = torch.arange(32) % 7
    data = 16 * [{"input_ids": ids, "labels": ids}]
    return {"coat_ds": coat_ds, "Trainer": Trainer, "model": model, "args": args, "data": data}
