"""Generates examples/finetune.ipynb: the sections of examples/finetune.py, for one GPU.

python docs/notebook.py > examples/finetune.ipynb
"""

import json
import re
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "examples/finetune.py"

INTRO = """\
# Fine-tune an 8B model on your data

All weights or LoRA, on one GPU, from `coat plan` to the saved model. With several GPUs start
[the script](finetune.py), which has the same steps.

Install torch first. Then run `pip install ".[huggingface]" trl peft` in a clone of COAT's repository.

<!-- made by: python docs/notebook.py > examples/finetune.ipynb -->"""

SETTINGS = """\
from types import SimpleNamespace

args = SimpleNamespace(
    model="Qwen/Qwen3-8B",  # a folder, or a model of the Hub
    data="chats.jsonl",  # lines of {"messages": [{"role": "user", "content": ...}, ...]} or {"text": ...}
    output="runs/finetune",
    lora=False,  # True: train adapters alone
    lr=None,  # None: 2e-4 with LoRA, else 1e-5
    batch=1,  # sequences of a micro-batch
    length=2048,  # tokens of a sequence, at most
    epochs=1.0,
    deepspeed=None,  # only the script runs under DeepSpeed
)"""

PLAN = """\
## Will it fit?

`coat plan` predicts a run under DeepSpeed. This notebook runs without DeepSpeed: 16 more bits in the states
replace the masters of BF16 weights. Its peak is that of the row COAT less half of the column `masters`. LoRA
needs the column `weights` and activations.

If it does not fit, use LoRA, fewer tokens, or `CoatAdamW(..., offload="cpu")`, which keeps the states in host
memory."""

COMMAND = "!coat plan {args.model} --sequence {args.length} --micro-batch {args.batch}"

USE = """\
## Use the model

It is a stock model now. In another process load `args.output`, without COAT."""

GENERATE = """\
prompt = tokenizer("1 and 1 make", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20)[0]))"""


def cells() -> list[tuple[str, str]]:
    """Kind and text of each cell."""
    script, *sections = re.split(r"^# %% (.+)\n\n", SCRIPT.read_text(), flags=re.M)
    imports = re.search(r"^import torch\n.*?^import coat_ds\n", script, re.M | re.S)[0]
    made = [("markdown", INTRO), ("code", SETTINGS), ("markdown", PLAN), ("code", COMMAND)]
    for title, code in zip(sections[::2], sections[1::2], strict=True):
        made += [("markdown", f"## {title}"), ("code", f"{imports}\n{code}".strip())]
        imports = ""
    return [*made, ("markdown", USE), ("code", GENERATE)]


def text() -> str:
    """The content of examples/finetune.ipynb."""
    found = []
    for number, (kind, source) in enumerate(cells()):
        cell = {
            "cell_type": kind,
            "id": str(number),
            "metadata": {},
            "source": source.splitlines(keepends=True),
        }
        found.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": found, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(text(), end="")
