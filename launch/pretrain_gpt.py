"""Pretrains a Llama-like GPT of megatron-core with a DeepSpeed engine, in BF16 or with COAT.

    python launch/pretrain_gpt.py
    python launch/pretrain_gpt.py --compare
    torchrun --nproc-per-node 8 launch/pretrain_gpt.py --model-config configs/model_125m.json --data corpus
    deepspeed launch/pretrain_gpt.py --deepspeed-config my_zero2.json --data shard.jsonl --tokenizer t.json

The "coat" block of the DeepSpeed JSON configures COAT; `--compare` trains twice with the same seed and data,
first without the block and with Megatron's own layers, then with it.

Exit codes: 0 done; 75 stopped by SIGTERM or SIGUSR1 after a checkpoint, start again with --resume (0 under a
torchrun that would restart it in place); 130 interrupted; 1 any other error, in one line if it is an expected
one.
"""

import argparse
import importlib.util
import os
import sys
import warnings
from pathlib import Path

try:
    from coat_launch import report
    from coat_launch.args import RUNS, parse_args
    from coat_launch.errors import LaunchError
    from coat_launch.process_group import check_launcher
    from coat_launch.trainer import Signals, Stopped, Trainer
except ModuleNotFoundError as error:
    if error.name != "coat_launch":
        raise
    clone = Path(__file__).resolve().parents[1]
    way_out = f"run `make setup` in {clone} and take its .venv/bin/python, or `pip install -e {clone}`"
    sys.exit(f"error: coat_launch is not installed for {sys.executable}: {way_out}")

import torch

# EX_TEMPFAIL of sysexits.h: try again
STOPPED = 75


def train(args: argparse.Namespace) -> None:
    """One run. Writes OUTPUT/<run>/summary.json, and the comparison of all runs there unless another one
    follows. Exits with one line for expected errors.
    """
    # Megatron's warnings about packages that are not needed here, and torch's about calls that DeepSpeed
    # makes
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    from coat_ds import CoatConfigError

    trainer, signals = None, Signals()
    try:
        trainer = Trainer(args)
        summary = trainer.train(signals)
        if trainer.is_main:
            report.write_summary(trainer.folder / "summary.json", summary)
        torch.distributed.destroy_process_group()
        if trainer.is_main and not args.compare:
            conclude(Path(args.output))
    except Stopped as stopped:
        if trainer.is_main:
            print(stopped, file=sys.stderr)
        torch.distributed.destroy_process_group()
        # torchrun would restart after another code, shortly before the scheduler ends the job
        sys.exit(0 if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) else STOPPED)
    except (LaunchError, CoatConfigError) as error:
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: out of GPU memory: lower --micro-batch-size or --seq-length ({error})")
    except KeyboardInterrupt:
        step = trainer.step if trainer is not None else 0
        print(f"\nstopped after step {step}; metrics are in {args.output}/metrics.jsonl", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # gloo's interrupted thread may abort Python's own exit (pytorch/pytorch#190489)
        os._exit(130)


def compare(args: argparse.Namespace, argv: list[str]) -> None:
    """Both runs, one after the other in this process: the second one in a program of its own, so that it has
    its own peak memory."""
    if "WORLD_SIZE" in os.environ:
        sys.exit("error: --compare: trains in one process. Start --variant bf16, then --variant coat")
    first, second = RUNS
    env = dict(os.environ)
    train(argparse.Namespace(**{**vars(args), "variant": first}))
    sys.stdout.flush()
    sys.stderr.flush()
    rest = [word for word in argv if word != "--compare"]
    module = [sys.executable, "-m", "coat_launch.pretrain_gpt"]
    os.execve(sys.executable, [*module, *rest, "--variant", second], env)


def conclude(output: Path) -> None:
    """Writes the summary, the table and the plot of all runs in the folder."""
    found = [run for run in RUNS if (output / run / "summary.json").exists()]
    summary = {run: report.read_summary(output / run / "summary.json") for run in found}
    report.write_summary(output / "summary.json", summary)
    print(f"\n{report.comparison_table(summary)}\n")
    try:
        report.plot_runs(report.read_metrics(output / "metrics.jsonl"), output / "loss.png")
        print(f"metrics.jsonl, loss.png and summary.json are in {output}")
    except ModuleNotFoundError as error:
        print(f"metrics.jsonl and summary.json are in {output}; for loss.png: pip install {error.name}")


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv, __doc__)
    # pip's extras have the names of the packages
    if missing := [name for name in ("deepspeed", "megatron") if importlib.util.find_spec(name) is None]:
        way_out = f'pip install "coat-train[{",".join(missing)}]"'
        sys.exit(f"error: {' and '.join(missing)}: not installed for {sys.executable}. {way_out}")
    try:
        check_launcher(os.environ)
    except LaunchError as error:
        sys.exit(f"error: {error}")
    if args.compare:
        compare(args, argv)
    else:
        train(args)


if __name__ == "__main__":
    main()
