"""Code blocks of the README, extracted and run."""

import copy
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.pages import README, ROOT, block, names_of_examples
from tests.util import free_port, run_distributed

MEGATRON_PAGE = (ROOT / "docs/megatron.md").read_text()
MEGATRON = os.environ.get("MEGATRON_PATH", "")


def sides(diff: str) -> tuple[str, str]:
    """The lines that a diff removes, and the lines that it adds."""
    lines = diff.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[0] != other) for other in "+-")


def test_is_short_and_its_links_lead_somewhere():
    assert len(README.split()) <= 550
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(targets) > 10
    assert [target for target in targets if not (ROOT / target).exists()] == []


def under_deepspeed(config: str) -> dict:
    """The COAT parts of DeepSpeed's engine under a config, and the losses of three steps."""
    import deepspeed

    torch.manual_seed(0)
    linear = [torch.nn.Linear(64, 64) for _ in range(2)]
    model = torch.nn.Sequential(linear[0], torch.nn.SiLU(), linear[1])
    engine, *_ = deepspeed.initialize(model=model, config=json.loads(config))
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    losses = []
    for _ in range(3):
        loss = (engine(x) - x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    optimizer = type(engine.basic_optimizer).__name__
    return {"optimizer": optimizer, "losses": losses, "coat": str(engine.coat)}


def hugging_face(lines: str, folder: str) -> dict:
    """The model after the lines of the page."""
    import coat_ds

    names = names_of_examples(folder)
    # the lines import it themselves
    del names["coat_ds"]
    model, keys = names["model"], list(names["model"].state_dict())
    exec(lines, names)
    before = copy.deepcopy(model.state_dict())
    names["trainer"].train()
    moved = sum(not torch.equal(before[key], value) for key, value in model.state_dict().items())
    return {
        "summary": coat_ds.conversion_of(model).summary(),
        "bytes": coat_ds.state_bytes(names["optimizer"])["bytes_per_parameter"],
        "names stay": list(model.state_dict()) == keys,
        "moved": moved / len(keys),
    }


def run_blocks(config: str, lines: str, folder: str) -> tuple[dict, dict]:
    return under_deepspeed(config), hugging_face(lines, folder)


def run_each(blocks: list[str], folder: str) -> list[str]:
    """Runs each block by itself, and the Trainer that it makes; returns the optimizers."""
    made = []
    for lines in blocks:
        names = names_of_examples(folder)
        exec(lines, names)
        optimizer = names.get("optimizer")
        if (trainer := names.get("trainer")) is not None:
            trainer.train()
            optimizer = trainer.optimizer.optimizer
        made.append(type(optimizer).__name__)
    return made


def test_python_of_the_pages_runs(tmp_path):
    """Except code for trainers that none of this project's extras installs."""
    pages = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    blocks = [block for page in pages for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)]
    foreign = r"^from (llamafactory|swift|axolotl|trl)\b"
    others = [b for b in blocks if re.search(foreign, b, re.M)]
    assert len(others) == 4 and all(compile(lines, "docs/finetune.md", "exec") for lines in others)
    blocks = [b for b in blocks if b not in others]
    (made,) = run_distributed(run_each, 1, blocks, str(tmp_path))
    assert len(blocks) >= 3 and made == len(blocks) * ["CoatAdamW"]


def test_json_and_hugging_face_lines_run(tmp_path):
    stock, ours = sides(block("diff"))
    ((engine, trainer),) = run_distributed(run_blocks, 1, ours, block("python"), str(tmp_path))
    assert json.loads(ours) == json.loads(stock) | {"coat": {"enabled": True}}
    assert engine["optimizer"] == "CoatAdamW" and "2 of 2 linear layers in FP8" in engine["coat"]
    assert engine["losses"][2] < engine["losses"][0]
    # all linear layers except the head
    assert "14 of 15 linear layers" in trainer["summary"]
    assert trainer["bytes"] < 2.3 and trainer["names stay"] and trainer["moved"] == 1


def megatron_command(page: str) -> list[str]:
    """The arguments of pretrain_gpt.py on a page."""
    words = shlex.split(block("bash", page).replace("\\\n", " "))
    return words[words.index("pretrain_gpt.py") + 1 :]


def import_spec(module: str, name: str) -> bool:
    """Whether Megatron's import of a spec makes the optimizer COAT's."""
    from megatron.core.transformer.spec_utils import ModuleSpec, import_module

    from megatron_ext.optimizer import patches

    before = patches.installed()
    return isinstance(import_module([module, name]), ModuleSpec) and patches.installed() and not before


@pytest.mark.parametrize("page", [README, MEGATRON_PAGE], ids=["README.md", "megatron.md"])
def test_megatron_finds_the_spec(page):
    words = megatron_command(page)
    at = words.index("--spec")
    assert run_distributed(import_spec, 1, *words[at + 1 : at + 3]) == [True]


# makes the command's 7B model small enough for a CPU: if an argument occurs twice, Megatron uses the last one
SMALL = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --vocab-size 127 --micro-batch-size 1 --global-batch-size 2 --train-iters 2
    --log-interval 1 --distributed-backend gloo
"""


@pytest.mark.long("Megatron-LM's own script")
@pytest.mark.skipif(not MEGATRON, reason="MEGATRON_PATH names no checkout of Megatron-LM")
def test_megatron_command_trains():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [
        f"--master-port={free_port()}",
        "-m",
        "tests.megatron_ext.scripted",
        f"{MEGATRON}/pretrain_gpt.py",
    ]
    # Megatron compiles with the python3 and python3-config of the path
    path = [str(Path(sys.executable).parent), sysconfig.get_config_var("BINDIR"), os.environ["PATH"]]
    packages = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"PATH": os.pathsep.join(path), "PYTHONPATH": packages, "PYTHONWARNINGS": "ignore"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [*command, *megatron_command(MEGATRON_PAGE), *SMALL.split()],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.findall(r"iteration +(\d+)/.*?lm loss: ", done.stdout) == ["1", "2"]
    assert "COAT: AdamW states" in done.stdout
