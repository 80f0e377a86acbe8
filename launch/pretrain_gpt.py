"""Pretrains a Llama-like GPT of megatron-core with a DeepSpeed engine, in BF16 or with COAT.

    python launch/pretrain_gpt.py
    python launch/pretrain_gpt.py --compare
    torchrun --nproc-per-node 8 launch/pretrain_gpt.py --model-config configs/model_125m.json --data corpus
    deepspeed launch/pretrain_gpt.py --deepspeed-config my_zero2.json --data shard.jsonl --tokenizer t.json

mpirun (Open MPI) and srun can start ranks, too, if MASTER_ADDR and MASTER_PORT are set.

The "coat" block of the DeepSpeed JSON configures COAT; `--compare` trains twice with the same seed and data,
first without the block and with Megatron's own layers, then with it.

Exit codes: 0 done; 75 stopped by SIGTERM or SIGUSR1 after a checkpoint, start again with --resume (0 under a
torchrun that would restart it in place); 130 interrupted; 1 any other error, in one line if it is an expected
one.
"""

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import warnings
from multiprocessing import resource_tracker
from pathlib import Path

try:
    from coat_launch import checkpoints, report
    from coat_launch.args import RUNS, parse_args
    from coat_launch.errors import DataError, LaunchError
    from coat_launch.output_lock import OutputLock
    from coat_launch.process_group import read_ranks
    from coat_launch.trainer import STOPPING, Signals, Stopped, Trainer
except ModuleNotFoundError as error:
    if error.name != "coat_launch":
        raise
    clone = Path(__file__).resolve().parents[1]
    way_out = f"run `make setup` in {clone} and take its .venv/bin/python, or `pip install -e {clone}`"
    sys.exit(f"error: coat_launch is not installed for {sys.executable}: {way_out}")

import torch

# EX_TEMPFAIL of sysexits.h: try again
STOPPED = 75


def train_once(args: argparse.Namespace, last: bool = True) -> None:
    """One run in this process. Writes OUTPUT/<run>/summary.json; the last run also writes the comparison of
    all runs. Exits with one line for expected errors.
    """
    # Megatron's warnings about packages that are not needed here, and torch's about calls that DeepSpeed
    # makes
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    from coat_ds import CoatConfigError

    trainer, signals, lock = None, Signals(), OutputLock(args.output)
    try:
        report.prepare_folder(args.output)
        trainer = Trainer(args, lock)
        report.prepare_folder(trainer.folder)
        # an earlier run's summary must not remain if this run fails
        (trainer.folder / "summary.json").unlink(missing_ok=True)
        summary = trainer.train(signals)
        if trainer.is_main:
            report.write_summary(trainer.folder / "summary.json", summary)
        torch.distributed.destroy_process_group()
        if last and trainer.is_main:
            conclude(Path(args.output))
    except Stopped as stopped:
        if trainer.is_main:
            print(stopped, file=sys.stderr)
        torch.distributed.destroy_process_group()
        sys.exit(STOPPED)
    except (
        LaunchError,
        DataError,
        report.OutputError,
        checkpoints.CheckpointError,
        CoatConfigError,
    ) as error:
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: out of GPU memory: lower --micro-batch-size or --seq-length ({error})")
    except KeyboardInterrupt:
        step = trainer.step if trainer is not None else 0
        print(
            f"\nstopped after step {step}; what was measured is in {args.output}/metrics.jsonl",
            file=sys.stderr,
        )
        lock.release()
        sys.stdout.flush()
        sys.stderr.flush()
        # gloo's interrupted thread may abort Python's own exit (pytorch/pytorch#190489)
        os._exit(130)
    finally:
        lock.release()


def compare(args: argparse.Namespace) -> None:
    """Both runs, each in a fresh process, so that each has its own peak memory. A signal between the runs
    goes to the second one, so that all ranks end in the same step."""
    port = int(os.environ.get("MASTER_PORT", 29500))
    received: list[int] = []
    process = None

    def hand_on(number: int, _) -> None:
        received.append(number)
        # a run that has ended gets no signal
        with contextlib.suppress(ProcessLookupError):
            if process is not None:
                os.kill(process.pid, number)

    for number in STOPPING:
        signal.signal(number, hand_on)
    # it unblocks signals when it starts
    resource_tracker.ensure_running()
    for index, run in enumerate(RUNS):
        if "WORLD_SIZE" in os.environ:
            # the launcher's store still holds the keys of the previous run
            os.environ.update(MASTER_PORT=str(port + 1 + index), TORCHELASTIC_USE_AGENT_STORE="False")
        # signals stay pending until the run has its handlers
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        process = multiprocessing.get_context("spawn").Process(
            target=train_once,
            args=(argparse.Namespace(**{**vars(args), "variant": run}), run == RUNS[-1]),
        )
        process.start()
        if received:
            os.kill(process.pid, received[-1])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        try:
            process.join()
        except KeyboardInterrupt:
            # the terminal sends the signal to the child too
            process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


def conclude(output: Path) -> None:
    """Writes the summary, the table and the plot of all runs in the folder."""
    found = [run for run in RUNS if (output / run / "summary.json").exists()]
    summary = {run: report.read_summary(output / run / "summary.json") for run in found}
    report.write_summary(output / "summary.json", summary)
    print(f"\n{report.comparison_table(summary)}\n")
    try:
        report.plot_runs(report.read_metrics(output / "metrics.jsonl"), summary, output / "loss.png")
        print(f"metrics.jsonl, loss.png and summary.json are in {output}")
    except ModuleNotFoundError as error:
        print(f"metrics.jsonl and summary.json are in {output}; for loss.png: pip install {error.name}")


def check_packages() -> None:
    """Raises LaunchError if a package is missing that training needs."""
    # pip's extras have the names of the packages
    if missing := [name for name in ("deepspeed", "megatron") if importlib.util.find_spec(name) is None]:
        way_out = f'pip install "coat-train[{",".join(missing)}]"'
        raise LaunchError(f"{' and '.join(missing)}: not installed for {sys.executable}. {way_out}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv, __doc__)
    try:
        check_packages()
        read_ranks(os.environ)
        (compare if args.compare else train_once)(args)
    except SystemExit as end:
        # torchrun would treat it as a failure and restart, shortly before the scheduler ends the job
        if end.code == STOPPED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
            sys.exit(0)
        raise
    except LaunchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
