"""A training run: engine and data, steps, validation, checkpoints, and measurements."""

import argparse
import dataclasses
import datetime
import functools
import math
import os
import signal
import statistics
import time
from pathlib import Path

import torch

from coat_ds.watch.readings import FILE
from coat_launch import checkpoints, report
from coat_launch.data import Corpus, Split, load_corpus
from coat_launch.deepspeed_config import read_deepspeed_config, set_batch_sizes, use_torch_adamw
from coat_launch.errors import LaunchError
from coat_launch.files import lock_folder, writing
from coat_launch.model import build_model, load_model_shape, parameter_groups, warmup_cosine
from coat_launch.process_group import check_nodes, from_main, start_process_group

# the first steps allocate memory and fill caches
WARM_STEPS = 3
# the settings of a run that a checkpoint names, and what to give to go on from it
IDENTITY = {
    "seed": "--seed",
    "seq-length": "--seq-length",
    "global-batch-size": "--global-batch-size",
    "training tokens": "the --data and --tokenizer of that run",
    "ZeRO stage": "the --deepspeed-config of that run",
}


class Stopped(Exception):
    """A signal has ended the run; a checkpoint was saved."""


class Signals:
    """Notes the signals that schedulers send before they end a job."""

    def __init__(self):
        self.received = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number, frame):
        self.received = True


class Trainer:
    """One run: the engine, its data and its measurements."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.config = read_deepspeed_config(args)
        from coat_ds import CoatConfig

        coat = CoatConfig.from_dict(self.config.get("coat"))
        self.run = "coat" if coat.enabled else "bf16"
        # readings go to the run's folder unless the block names another, for `coat watch`
        if coat.enabled and coat.watch.every and not coat.watch.folder:
            found = dataclasses.asdict(coat.watch) | {"folder": str(self.folder)}
            self.config["coat"] = {**self.config["coat"], "watch": found}
        shape = load_model_shape(args)
        self.corpus: Corpus = load_corpus(
            args.data, seq_length=args.seq_length, seed=args.seed, tokenizer=args.tokenizer
        )
        self._join_ranks()
        if self.is_main:
            report.show_graphs()
        self.micro_batch_size, self.global_batch_size = set_batch_sizes(self.config, args, self.ranks)
        model = build_model(args, shape, coat, self.corpus.vocab_size)
        self.saved_bytes = self._measure_saved_bytes(model)
        if not coat.enabled:
            use_torch_adamw(self.config)
        checkpoint = self._find_checkpoint()
        self.engine = self._make_engine(model)
        self.step, self.val_loss_start = 0, None
        # on rank 0, during training
        self._metrics = None
        self.resumed = checkpoint is not None
        if self.resumed:
            self._load(checkpoint)

    def _join_ranks(self) -> None:
        """Starts the process groups, after the output is this run's."""
        args, timeout = self.args, datetime.timedelta(seconds=self.args.distributed_timeout)
        self.device = start_process_group(timeout)
        check_nodes(Path(args.output))
        from_main(self._take_output)
        from megatron_ext import mpu
        from megatron_ext.model import initialize_model_parallel
        from megatron_ext.options import VARIABLE

        minutes = timeout / datetime.timedelta(minutes=1)
        initialize_model_parallel(seed=args.seed, distributed_timeout_minutes=minutes)
        self.group, self.rank = mpu.get_data_parallel_group(), mpu.get_data_parallel_rank()
        self.ranks, self.is_main = mpu.get_data_parallel_world_size(), torch.distributed.get_rank() == 0
        # Megatron's layers would read this variable
        if os.environ.pop(VARIABLE, None) is not None and self.is_main:
            print(f"{VARIABLE} is of no effect: the block stands in --deepspeed-config", flush=True)

    def _take_output(self) -> None:
        """Locks the output for this process."""
        self._lock = lock_folder(self.args.output)

    def _measure_saved_bytes(self, model: torch.nn.Module) -> float:
        """Bytes that a layer saves for backward, per token, by a pass over the first batch."""
        from megatron_ext.saved_bytes import saved_bytes

        first = next(self._batches(self.corpus.train, 0))
        saved = saved_bytes(model, lambda: self._loss(model, first))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        # whole sequences: a layer may process only a part of each
        return saved.total / (saved.layers * first.tokens.numel())

    def _make_engine(self, model: torch.nn.Module):
        import deepspeed

        import coat_ds
        from megatron_ext import mpu

        args = self.args
        warmup = args.steps // 10 if args.warmup_steps is None else args.warmup_steps
        schedule = functools.partial(warmup_cosine, warmup=warmup, total=args.steps)
        own_schedule = "scheduler" not in self.config
        coat_ds.install()
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=parameter_groups(model),
            lr_scheduler=(lambda o: torch.optim.lr_scheduler.LambdaLR(o, schedule)) if own_schedule else None,
            mpu=mpu,
            config=self.config,
        )
        return engine

    @property
    def folder(self) -> Path:
        return Path(self.args.output) / self.run

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoints"

    def train(self, signals: Signals) -> dict:
        """Trains to the last step; returns what summary.json holds of a run.

        Raises Stopped if any rank received a signal, after a checkpoint is saved.
        """
        args = self.args
        if self.is_main:
            with writing(self.folder):
                self.folder.mkdir(exist_ok=True)
                # of an earlier run
                for name in ("summary.json", *(() if self.resumed else (FILE,))):
                    (self.folder / name).unlink(missing_ok=True)
            self._metrics = report.MetricsWriter(
                Path(args.output) / "metrics.jsonl", self.run, self.step if self.resumed else None
            )
            self._log(self._describe())
        val_loss, speeds = None, []
        if self.val_loss_start is None:
            self.val_loss_start = self._validate()
        while self.step < args.steps:
            started = time.perf_counter()
            loss = self._train_step()
            speeds.append(self.global_batch_size * args.seq_length / (time.perf_counter() - started))
            self.step += 1
            self._record_step(loss, speeds[-1])
            last = self.step == args.steps
            if last or self.step % args.eval_interval == 0:
                val_loss = self._validate()
            stopping = self._any_rank(signals.received) and not last
            if stopping or (args.save_interval and (last or self.step % args.save_interval == 0)):
                self._save()
            if stopping:
                raise Stopped(f"stopped by a signal after step {self.step}, saved; go on with --resume")
        # None: the previous run ended between its last checkpoint and its summary
        return self._summary(self._validate() if val_loss is None else val_loss, speeds)

    def _record_step(self, loss: float, speed: float) -> None:
        # None if DeepSpeed is configured not to compute it
        norm = self.engine.get_global_grad_norm()
        if not math.isfinite(loss) or not math.isfinite(norm or 0.0):
            raise LaunchError(
                f"training diverged: loss {loss}, norm of the gradients {norm} at step {self.step}. Lower "
                "--lr or raise --warmup-steps; --resume goes on from the last checkpoint"
            )
        if self.is_main:
            values = {"lr": self.engine.get_lr()[0], "tokens_per_s": speed, "loss": loss}
            if norm is not None:
                values["grad_norm"] = float(norm)
            self._metrics.write(self.step, **values)
            # about twenty lines a run
            if self.step % max(1, self.args.steps // 20) == 0 or self.step == self.args.steps:
                shown = f"step {self.step}/{self.args.steps}: loss {loss:.4f}"
                if self.device.type == "cuda":
                    shown += f", {speed:,.0f} tokens/s, {torch.cuda.memory_allocated() / 2**30:.2f} GiB"
                self._log(shown)

    def _log(self, text: str) -> None:
        print(f"{self.run}: {text}", flush=True)

    def _batches(self, split: Split, consumed: int):
        for batch in split.micro_batches(
            consumed,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            rank=self.rank,
            ranks=self.ranks,
        ):
            yield type(batch)(*(tensor.to(self.device) for tensor in batch))

    @staticmethod
    def _loss(model, batch) -> torch.Tensor:
        """Mean over the tokens, in nats, FP32."""
        losses = model(batch.tokens, batch.position_ids, None, labels=batch.labels)
        return (losses * batch.loss_mask).sum() / batch.loss_mask.sum()

    def _mean(self, losses: list[torch.Tensor]) -> float:
        """The mean over micro-batches and data-parallel ranks."""
        mean = torch.stack(losses).mean()
        torch.distributed.all_reduce(mean, group=self.group)
        return mean.item() / self.ranks

    def _any_rank(self, flag: bool) -> bool:
        flags = torch.tensor(int(flag), device=self.device)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        return bool(flags.item())

    def _train_step(self) -> float:
        losses = []
        for batch in self._batches(self.corpus.train, self.step * self.global_batch_size):
            loss = self._loss(self.engine, batch)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return self._mean(losses)

    def _validate(self) -> float:
        """Validation loss on the same held-out sequences every time."""
        self.engine.eval()
        with torch.no_grad():
            losses = [
                self._loss(self.engine, batch)
                for index in range(self.args.eval_batches)
                for batch in self._batches(self.corpus.validation, index * self.global_batch_size)
            ]
        self.engine.train()
        val_loss = self._mean(losses)
        if self.is_main:
            self._metrics.write(self.step, val_loss=val_loss)
            self._log(f"validation loss {val_loss:.4f} after {self.step} steps")
        return val_loss

    def _identity(self) -> dict:
        """What has to be equal for a resumed run to continue with the next data, and with the same states."""
        args, stage = self.args, self.engine.zero_optimization_stage()
        tokens = self.corpus.train.num_tokens
        values = (args.seed, args.seq_length, self.global_batch_size, tokens, int(stage))
        return dict(zip(IDENTITY, values, strict=True))

    def _save(self) -> None:
        state = {"step": self.step, "val_loss_start": self.val_loss_start, "identity": self._identity()}
        checkpoints.save(self.engine, self.checkpoint_folder, state, keep=self.args.keep_checkpoints)

    def _find_checkpoint(self) -> Path | None:
        """The checkpoint to resume from. Refuses to treat an older run's checkpoints as this run's."""
        found, newest = None, checkpoints.newest(self.checkpoint_folder)
        if self.args.resume is not None:
            found = checkpoints.newest(Path(self.args.resume)) if self.args.resume else newest
        if found is None and self.args.resume:
            raise LaunchError(
                f"--resume {self.args.resume}: no checkpoint there (no folder named as step100)"
            )
        if newest is not None and (found is None or newest.resolve() != found.resolve()):
            raise LaunchError(
                f"--output {self.args.output}: {newest} is there, from an earlier run: go on from it with "
                "--resume, remove it, or choose another folder"
            )
        return found

    def _load(self, checkpoint: Path) -> None:
        from coat_kernels.weights import invalidate_weight_caches

        state = checkpoints.load(self.engine, checkpoint)
        # the pass that measured saved_bytes has used other weights
        invalidate_weight_caches()
        saved = state.get("identity", {})
        if missing := [key for key in IDENTITY if key not in saved]:
            raise LaunchError(
                f"--resume {checkpoint}: expected the settings of its run, found no {', '.join(missing)}: an "
                "older version wrote it. Go on with that version, or start a new run in another --output"
            )
        with checkpoints.reading(checkpoint):
            self.step, self.val_loss_start = state["step"], float(state["val_loss_start"])
        for key, value in self._identity().items():
            if saved[key] != value:
                raise LaunchError(
                    f"--resume {checkpoint}: the checkpoint was made with {key} {saved[key]}, found {value}: "
                    f"the run would not go on as it was. Give {IDENTITY[key]}"
                )
        if self.is_main:
            self._log(f"going on from {checkpoint}")

    def _describe(self) -> str:
        kind = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        parameters = sum(p.numel() for p in self.engine.module.parameters())
        return (
            f"{parameters:,} parameters on {torch.distributed.get_world_size()} x {kind}, "
            f"ZeRO stage {self.engine.zero_optimization_stage()}, "
            f"{self.global_batch_size} x {self.args.seq_length} tokens a step"
        )

    def _summary(self, val_loss: float, speeds: list[float]) -> dict:
        import coat_ds

        peak = None
        if self.device.type == "cuda":
            largest = torch.tensor(torch.cuda.max_memory_allocated(), device=self.device)
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
            peak = largest.item()
        return {
            "val_loss_start": self.val_loss_start,
            "val_loss": val_loss,
            "state_bytes_per_param": coat_ds.state_bytes(self.engine)["bytes_per_parameter"],
            "saved_bytes_per_token_layer": self.saved_bytes,
            "peak_bytes": peak,
            "tokens_per_s": statistics.median(speeds[WARM_STEPS:] or speeds or [0.0]),
            "steps": self.step,
        }
