"""The examples run unchanged, with the commands of their docstrings."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.hosts import TEST_ALL
from tests.util import run_distributed

pytestmark = pytest.mark.early

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def started(*words):
    """The output of a new process, with its log."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, timeout=300, **both)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def torchrun(*args):
    return started("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *args)


def python(*args):
    """The output of a script, as `each` has it."""
    return each(args)[0]


def each(*commands):
    """The outputs of scripts, which `make test` runs one after the other in a process that has imported the
    frameworks."""
    return [started(*words) for words in commands] if TEST_ALL else run_distributed(alone, 1, *commands)[0]


def main(script, *args):
    """The output of the script, run by a process that has imported the frameworks."""
    said = io.StringIO()
    with mock.patch.object(sys, "argv", [script, *args]), contextlib.redirect_stdout(said):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return said.getvalue()


def alone(*commands):
    """`main` of each command without the variables of a launcher."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return [main(*words) for words in commands]


def forked(ranks, *args):
    """The output of rank 0, as under torchrun, in less time.

    These ranks end without Python's finalization, in which gloo's threads may abort
    (pytorch/pytorch#190489).
    """
    return run_distributed(main, ranks, *args)[0]


def losses(said):
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", said, re.M)}


def state_bytes(said):
    return float(re.search(r"bytes of states per parameter: (\S+)", said)[1].rstrip(","))


def test_every_example_is_in_the_readme_and_tested():
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == set(re.findall(r"\(examples/(\w+\.py)\)", (ROOT / "README.md").read_text()))
    assert scripts == set(re.findall(r"\"examples/(\w+\.py)\"", Path(__file__).read_text()))


@pytest.mark.long("an unmodified script, for which DeepSpeed compiles its collectives")
@pytest.mark.parametrize("start", [torchrun, python])
def test_deepspeed(start):
    said = start("examples/deepspeed_json.py", "--steps=8")
    assert "5 of 5 linear layers in FP8" in said and "bytes per parameter" in said
    found = losses(said)
    # the loss falls from about ln 256
    assert list(found) == [*range(1, 9)] and 5 < found[1] < 6.2 and found[8] < found[1] - 0.5


@pytest.mark.long("an unmodified script, for which DeepSpeed compiles its collectives")
def test_trainer_under_deepspeed():
    said = python("examples/trainer.py", "--steps=2")
    assert "14 of 15 linear layers in FP8" in said and "'train_loss': " in said


def small_model(folder):
    """A tiny Llama with a tokenizer of bytes, and conversations of sums, as users bring theirs."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    made.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=272, **sizes)).save_pretrained(folder)
    lines = [json.dumps({"text": f"{i} and {i} make {2 * i}."}) for i in range(80)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return str(folder), str(folder / "data.jsonl"), "--lr=5e-3", "--length=64"


def test_scripts_of_transformers(tmp_path):
    """One process for all of them, since the imports take longest."""
    from transformers import AutoModelForCausalLM

    tune = ("examples/finetune.py", *small_model(tmp_path), "--epochs=2", "--batch=4")
    trained, *tuned = each(
        ("examples/trainer.py", "--plain", "--steps=2"),
        (*tune, f"--output={tmp_path}/whole"),
        (*tune, f"--output={tmp_path}/adapters", "--lora"),
    )
    assert "'train_loss': " in trained
    for folder, said in zip(("whole", "adapters"), tuned, strict=True):
        first, last = (float(loss) for loss in re.findall(r"'eval_loss': '?([\d.]+)", said)[:2])
        stock = float(re.search(r"held-out loss in BF16: (\S+)", said)[1])
        assert last < first < 5.7 and abs(stock - last) < 0.05
        # what was saved loads without COAT
        assert AutoModelForCausalLM.from_pretrained(tmp_path / folder).config.hidden_size == 64


@pytest.mark.long(
    "a kernel of Jupyter that imports the frameworks; test_scripts_of_transformers runs the same code"
)
@pytest.mark.parametrize("lora", [False, True])
def test_the_notebook_runs(lora, tmp_path, monkeypatch):
    """Its cells, in a kernel of Jupyter, with other settings."""
    import nbformat
    from nbclient import NotebookClient
    from transformers import AutoModelForCausalLM

    folder, data, *_ = small_model(tmp_path)
    book = nbformat.read(ROOT / "examples/finetune.ipynb", nbformat.NO_CONVERT)
    nbformat.validate(book)
    settings = next(cell for cell in book.cells if cell.cell_type == "code")
    own = {"model": folder, "data": data, "output": f"{tmp_path}/out", "lora": lora, "lr": 5e-3, "length": 64}
    for name, value in own.items():
        settings.source, found = re.subn(rf"(?<= {name}=).*?(?=,)", repr(value), settings.source, count=1)
        assert found == 1
    # the command coat of this environment
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    for name, value in (ENVIRONMENT | {"PATH": os.pathsep.join(paths)}).items():
        monkeypatch.setenv(name, value)
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    said = "".join(out.get("text", "") for cell in book.cells for out in cell.get("outputs", []))
    assert re.search(r"14 of \d+ linear layers in FP8", said) and "ZeRO-2, micro-batch 1 x 64 tokens" in said
    # below that of equally likely letters: ln 272 is 5.6
    assert float(re.search(r"held-out loss in BF16: (\S+)", said)[1]) < 5.2
    assert "1 and 1 make" in said
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 64


def test_megatron():
    said = python("examples/megatron_gpt.py", "--steps=8")
    found = losses(said)
    assert 5 < found[1] < 6.2 and found[8] < found[1] - 0.5
    # codes of both moments, and the 16 bits that extend BF16 weights to masters
    assert 4 < state_bytes(said) < 4.2


def test_optimizer():
    said = python("examples/optimizer.py", "--steps=100")
    ours, stock = map(float, re.search(r"last loss: CoatAdamW (\S+), AdamW (\S+)", said).groups())
    assert 2 < state_bytes(said) < 2.2
    # not the same bits, but nearly the same loss
    assert ours != stock and abs(ours / stock - 1) < 0.01
    assert said.endswith("from AdamW's own state: torch.float32\n")


def test_fsdp2_resumes_at_another_number_of_ranks(tmp_path):
    script = "examples/fsdp2.py"
    whole = losses(forked(1, script, "--steps=6", f"--checkpoint={tmp_path}/whole"))
    said = forked(2, script, "--steps=4", f"--checkpoint={tmp_path}/cut")
    assert re.search(r"^rank 0 holds 2\.\d+ bytes of AdamW states per parameter$", said, re.M)
    resumed = losses(forked(1, script, "--steps=6", "--resume", f"--checkpoint={tmp_path}/cut"))
    assert list(losses(said)) == [1, 2, 3, 4] and list(resumed) == [5, 6]
    assert whole[4] < whole[1] - 0.3
    # gathered weights are BF16, and the gradients of two ranks are summed
    for step, loss in {**losses(said), **resumed}.items():
        assert abs(loss - whole[step]) < 1e-3
