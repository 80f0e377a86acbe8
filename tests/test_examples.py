"""The examples run as they are, as their docstrings say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def torchrun(ranks, *args):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *args],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.long("an unmodified script, for which DeepSpeed compiles its collectives")
def test_trainer_under_deepspeed():
    said = torchrun(1, "examples/trainer.py", "--steps=2")
    assert "14 of 15 linear layers in FP8" in said and "'train_loss': " in said


def test_trainer_without_deepspeed():
    script = [sys.executable, "examples/trainer.py", "--plain", "--steps=2"]
    done = subprocess.run(script, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "'train_loss': " in done.stdout, done.stderr[-4000:]


def losses(said):
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", said, re.M)}


def test_fsdp2_resumes_at_another_number_of_ranks(tmp_path):
    script = "examples/fsdp2.py"
    whole = losses(torchrun(2, script, "--steps=6", f"--checkpoint={tmp_path}/whole"))
    said = torchrun(2, script, "--steps=4", f"--checkpoint={tmp_path}/cut")
    assert re.search(r"^rank 0 holds 2\.\d+ bytes of AdamW states per parameter$", said, re.M)
    assert losses(said) == {step: whole[step] for step in range(1, 5)}
    assert whole[4] < whole[1] - 0.3
    resumed = losses(torchrun(1, script, "--steps=6", "--resume", f"--checkpoint={tmp_path}/cut"))
    assert list(resumed) == [5, 6]
    # gathered weights are BF16, and two ranks sum their gradients
    for step, loss in resumed.items():
        assert abs(loss - whole[step]) < 1e-3
