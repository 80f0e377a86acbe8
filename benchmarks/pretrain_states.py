"""Validation losses of the quickstart with each way to keep what AdamW keeps, over seeds.

Each run is `launch/pretrain_gpt.py` in a process of its own: quickstart's model, text, learning rates and 120
steps under DeepSpeed, ZeRO-1. Layers compute in BF16, so that states and masters are all that differs.
`masters` are DeepSpeed's in FP32, or what `bf16_params` makes of BF16 ones. A seed decides weights, batches
and what is held out.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.pairs import paired, show
from benchmarks.common.training import CONFIGS, SMALL
from benchmarks.common.whole_models import BF16_MASTERS

SCRIPT = Path(__file__).parents[1] / "launch" / "pretrain_gpt.py"


class Arm(NamedTuple):
    exp_avg_format: str
    exp_avg_sq_format: str
    masters: str
    """ "fp32", or a value of `bf16_params`."""

    def config(self) -> dict:
        """Quickstart's DeepSpeed JSON with these."""
        config = json.loads((CONFIGS / "ds_zero1_coat.json").read_text())
        optimizer = {"exp_avg_format": self.exp_avg_format, "exp_avg_sq_format": self.exp_avg_sq_format}
        if self.masters != "fp32":
            optimizer["bf16_params"] = self.masters
            config["bf16"] |= BF16_MASTERS
        config["coat"] |= {"optimizer": optimizer, "activations": {"enabled": False}}
        return config


BASELINE = Arm("fp32", "fp32", "fp32")
ARMS = (
    BASELINE,
    Arm("ratio8", "log8", "fp32"),
    Arm("fp8_expanded", "fp8_expanded", "fp32"),
    Arm("ratio8", "log8", "exact"),
    Arm("ratio8", "log8", "stochastic"),
)


def summary(rows: list[dict]) -> list[dict]:
    """Each arm beside FP32 moments and masters of the same seeds."""
    return paired(rows, ("steps",), Arm._fields, BASELINE)


def trained(arm: Arm, seed: int, steps: int) -> float:
    """The validation loss of a run. Raises CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "deepspeed.json")
        config.write_text(json.dumps(arm.config()))
        arguments = ["--model-config", SMALL.shape_file, "--deepspeed-config", config, "--output", folder]
        command = [sys.executable, SCRIPT, *arguments, "--seed", seed, "--steps", steps]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(folder, "summary.json").read_text())["coat"]["val_loss"]


def options(parser) -> None:
    parser.add_argument("--seeds", type=int, default=6, help="how many, from 1 on (default %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="of a run (default %(default)s)")


@benchmark(needs_gpu=False, options=options)
def pretrain_states(arguments, table: Table) -> None:
    """Losses of the quickstart with each storage of moments and masters, over seeds, through the launcher.

    `to_baseline`: validation loss less that of FP32 moments and masters of the same seed, mean over seeds;
    `error`: its standard error. Single runs are in the file.
    """
    seeds, steps = (1, 2) if arguments.quick else (arguments.seeds, arguments.steps)
    for seed in range(1, seeds + 1):
        for arm in ARMS:
            table.add(**arm._asdict(), seed=seed, steps=steps, val_loss=trained(arm, seed, steps))
    show(summary(table.rows))
