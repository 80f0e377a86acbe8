"""Pretrains a Llama-like GPT of megatron-core with a DeepSpeed engine, in BF16 or with COAT.

    python launch/pretrain_gpt.py
    python launch/pretrain_gpt.py --compare
    torchrun --nproc-per-node 8 launch/pretrain_gpt.py --model-config configs/model_125m.json --data corpus
    deepspeed launch/pretrain_gpt.py --deepspeed-config my_zero2.json --data shard.jsonl --tokenizer t.json

mpirun (Open MPI) and srun start ranks, too, where MASTER_ADDR and MASTER_PORT are set.

The "coat" block of the DeepSpeed JSON decides; `--compare` trains twice with the same seed and data, first
without the block and with Megatron's own layers, then with it.

Exit codes: 0 done; 75 stopped by SIGTERM or SIGUSR1 after a checkpoint, start again with --resume (0 under a
torchrun that would restart it in place); 130 interrupted; 1 anything else, said in one line where expected.
"""

import argparse
import dataclasses
import datetime
import functools
import math
import multiprocessing
import os
import re
import resource
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from coat_launch import checkpoints, config_path, report
from coat_launch.data import Corpus, DataError, Split, load_corpus, padded_vocab_size
from coat_launch.json_file import read_object
from coat_launch.output_lock import OutputLock

RUNS = ("bf16", "coat")
# of the DeepSpeed JSON, changed or looked at here
SECTIONS = ("optimizer", "zero_optimization", "checkpoint")
SHAPE_FLAGS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
# the first steps allocate and warm caches up
WARM_STEPS = 3
# so many steps in a row whose loss or gradients are not finite are no accident
MAX_FAILURES = 10
# of Open MPI and of a step of Slurm: what torchrun calls RANK, LOCAL_RANK and WORLD_SIZE
RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)
# EX_TEMPFAIL of sysexits.h: try again
STOPPED = 75


class LaunchError(ValueError):
    """Arguments that cannot be honoured; the message names the argument and the way out."""


class Stopped(Exception):
    """A signal asked for an end; a checkpoint was saved."""


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text}")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("model").add_argument
    add("--model-config", default=config_path("model_quickstart.json"), help="JSON file with the shape")
    for flag in SHAPE_FLAGS:
        add("--" + flag.replace("_", "-"), type=positive, help="in place of the model config's")

    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="text files, .jsonl files with a text in each line, folders of them, or Megatron indexed "
        "datasets; without it, the Python standard library's sources. Every process tokenises text at its "
        "start: use the indexed format for many gigabytes",
    )
    add("--tokenizer", metavar="JSON", help="Hugging Face tokenizer.json; bytes without it")
    add("--vocab-size", type=positive, help="number of ids of indexed data without --tokenizer")
    add("--seq-length", type=positive, default=128, help="tokens per sequence (default %(default)s)")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=120, help="optimizer steps (default %(default)s)")
    add("--micro-batch-size", type=positive, help="sequences per rank and pass; else the JSON's, else 4")
    add("--global-batch-size", type=positive, help="sequences per step, by accumulation; else the JSON's")
    add("--lr", type=float, help="peak learning rate; else the JSON's")
    add("--warmup-steps", type=int, help="linear warmup, then cosine to 10%% (default a tenth of --steps)")
    add(
        "--tensor-model-parallel-size",
        type=positive,
        default=1,
        help="ranks that share each layer (default %(default)s)",
    )
    add(
        "--sequence-parallel",
        action="store_true",
        help="split the sequence between the layers over the same ranks",
    )
    add(
        "--non-finite",
        choices=("stop", "skip"),
        default="stop",
        help="at a loss that is NaN or infinite: stop, or skip the step, say so and go on, but for "
        f"{MAX_FAILURES} in a row (default %(default)s)",
    )
    add(
        "--distributed-timeout",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="after which a rank that does not answer, of a lost host, ends the run (default %(default)s)",
    )
    add("--seed", type=int, default=1234, help="weights, order and split of the data (default %(default)s)")
    add("--deepspeed-config", default=config_path("ds_zero1_coat.json"), help="DeepSpeed JSON")
    # not --run, which torchrun takes for an abbreviation of its own
    add("--variant", choices=RUNS, help="override the JSON: bf16 disables the coat block")
    add("--compare", action="store_true", help="both runs, one after the other, and a table")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)

    add = parser.add_argument_group("output").add_argument
    add(
        "--output",
        default="runs/gpt",
        help="folder for metrics, plot, summary, checkpoints (default %(default)s)",
    )
    add("--eval-interval", type=positive, help="steps between validations (default a fifth of --steps)")
    add(
        "--eval-batches", type=positive, default=8, help="global batches per validation (default %(default)s)"
    )
    add("--save-interval", type=positive, help="steps between checkpoints in OUTPUT/<run>/checkpoints")
    add(
        "--load",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="go on from the newest whole checkpoint in this folder (or from this checkpoint), without a "
        "value in OUTPUT/<run>/checkpoints",
    )
    add("--resume", action="store_true", help="as --load, but start where there is no checkpoint yet")
    add("--keep-checkpoints", type=positive, metavar="N", help="remove all but the newest N (default: none)")
    args = parser.parse_args(argv)
    args.eval_interval = args.eval_interval or max(1, args.steps // 5)
    args.warmup_steps = args.steps // 10 if args.warmup_steps is None else args.warmup_steps
    if args.compare and args.variant:
        parser.error("--compare makes both runs: drop --variant")
    if args.compare and args.load:
        parser.error("--compare resumes each run from its own folder: give --load without one")
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        parser.error("--sequence-parallel: needs --tensor-model-parallel-size above 1, found 1")
    if args.sequence_parallel and args.seq_length % args.tensor_model_parallel_size:
        parser.error(
            f"--sequence-parallel: --seq-length {args.seq_length} does not divide by "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}"
        )
    if args.resume and args.load is not None:
        parser.error("--resume is --load that may find nothing: give one of them")
    if args.warmup_steps < 0:
        parser.error(f"--warmup-steps: expected 0 or more, found {args.warmup_steps}")
    return args


def read_host_config(args: argparse.Namespace) -> dict:
    """The DeepSpeed JSON with what `--variant` and `--lr` change."""
    path = Path(args.deepspeed_config)
    try:
        config = read_object(path)
    except ValueError as error:
        raise LaunchError(f"--deepspeed-config {path}: {error}") from error
    for key in SECTIONS:
        if not isinstance(config.get(key, {}), dict):
            raise LaunchError(
                f"--deepspeed-config {path}: {key}: expected an object in braces, found {config[key]!r}"
            )
    params = config.get("optimizer", {}).get("params")
    if not isinstance(params, dict | None):
        raise LaunchError(
            f"--deepspeed-config {path}: optimizer.params: expected an object in braces, found {params!r}"
        )
    if not _enabled(config, "bf16"):
        raise LaunchError(
            f'--deepspeed-config {path}: expected "bf16": {{"enabled": true}}, the model is BF16'
        )
    if args.variant == "bf16":
        config["coat"] = {"enabled": False}
    elif args.variant == "coat" and not _enabled(config, "coat"):
        raise LaunchError(f'--deepspeed-config {path}: a COAT run needs "coat": {{"enabled": true}}')
    if args.lr is not None:
        optimizer = config.setdefault("optimizer", {"type": "AdamW"})
        optimizer["params"] = {**(params or {}), "lr": args.lr}
    return config


def _enabled(config: dict, block: str) -> bool:
    return isinstance(config.get(block), dict) and config[block].get("enabled") is True


def set_batch_sizes(config: dict, args: argparse.Namespace, ranks: int) -> tuple[int, int]:
    """Writes micro and global batch size into the config, arguments before JSON; returns both."""

    def configured(key: str, default: int) -> int:
        value = config.get(key, "auto")
        if value != "auto" and (type(value) is not int or value < 1):
            raise LaunchError(
                f"{key}: expected a whole number above 0 in the DeepSpeed JSON, found {value!r}"
            )
        return default if value == "auto" else value

    micro = args.micro_batch_size or configured("train_micro_batch_size_per_gpu", 4)
    steps = configured("gradient_accumulation_steps", 1)
    total = args.global_batch_size or configured("train_batch_size", micro * ranks * steps)
    if total % (micro * ranks):
        raise LaunchError(
            f"--global-batch-size: {total} is not a multiple of --micro-batch-size {micro} times {ranks} "
            "data-parallel ranks"
        )
    config.update(
        train_micro_batch_size_per_gpu=micro,
        train_batch_size=total,
        gradient_accumulation_steps=total // (micro * ranks),
    )
    return micro, total


def use_torch_adamw(config: dict) -> None:
    """Without COAT, AdamW is torch's fused one: DeepSpeed's keeps the same states and wants a compiler."""
    optimizer = config.get("optimizer", {})
    if str(optimizer.get("type")).lower() in ("adam", "adamw"):
        optimizer["params"] = {**(optimizer.get("params") or {}), "torch_adam": True, "fused": True}


def warmup_cosine(step: int, *, warmup: int, total: int) -> float:
    """Factor of the peak learning rate: linear to 1, then half a cosine down to 0.1."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup)))


def load_model_shape(args: argparse.Namespace):
    from megatron_ext.model import load_shape

    try:
        shape = load_shape(args.model_config)
        return dataclasses.replace(
            shape, **{f: v for f in SHAPE_FLAGS if (v := getattr(args, f)) is not None}
        )
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"--model-config {args.model_config}: {error}") from error


def read_ranks(env: dict[str, str]) -> None:
    """Sets RANK, LOCAL_RANK and WORLD_SIZE where mpirun or srun started several processes.

    Raises LaunchError where these would not find each other: each would train alone.
    """
    port = env.get("MASTER_PORT", "1")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise LaunchError(f"MASTER_PORT: expected a number from 1 to 65535, found {port[:60]!r}")
    if "WORLD_SIZE" in env:
        return
    for rank, local_rank, size in RANK_VARIABLES:
        if int(env.get(size, 1)) > 1:
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                if name not in env:
                    raise LaunchError(
                        f"{name}: not set, but this is one of {env[size]} processes ({size}): set it to "
                        "where rank 0 runs, or start by a script of launch/"
                    )
            env.update(RANK=env[rank], LOCAL_RANK=env[local_rank], WORLD_SIZE=env[size])
            return


def start_process_group(timeout: datetime.timedelta) -> torch.device:
    """Starts torch.distributed from the launcher's environment, or for this process alone."""
    alone = "WORLD_SIZE" not in os.environ
    if alone:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local_rank >= gpus:
            raise LaunchError(
                f"every rank needs a GPU of its own: this rank is number {local_rank} here, from 0, and "
                f"there are {gpus}. Start as many processes as there are GPUs."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from megatron_ext import cpu

        cpu.enable()
    import deepspeed

    if not on_gpu:
        # DeepSpeed would compile its shared-memory collectives for a minute; gloo does the same
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if alone:
        # a store in memory needs no free port
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed(timeout=timeout)
    return device


class Trainer:
    """One run: the engine, its data and what is measured."""

    def __init__(self, args: argparse.Namespace, lock: OutputLock):
        """`lock` is taken by rank 0."""
        self.args, self._lock = args, lock
        self.config = read_host_config(args)
        if args.tensor_model_parallel_size > 1:
            # kernels run in the order of their launch: what is sent starts before the product that hides it
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

        import coat_ds
        from megatron_ext import layer_specs, mpu
        from megatron_ext.ledger import saved_bytes
        from megatron_ext.model import build_gpt, initialize_model_parallel

        coat = coat_ds.CoatConfig.from_dict(self.config.get("coat"))
        self.run = "coat" if coat.enabled else "bf16"
        fp8_layers = coat.enabled and coat.activations.enabled
        shape = load_model_shape(args)
        self.corpus: Corpus = load_corpus(
            args.data,
            seq_length=args.seq_length,
            seed=args.seed,
            tokenizer=args.tokenizer,
            vocab_size=args.vocab_size,
        )
        timeout = datetime.timedelta(seconds=args.distributed_timeout)
        self.device = start_process_group(timeout)
        # nothing is written before
        self._on_main(lambda: lock.take(functools.partial(print, flush=True)))
        world = torch.distributed.get_world_size()
        tp_size = args.tensor_model_parallel_size
        if world % tp_size:
            raise LaunchError(
                f"--tensor-model-parallel-size: {tp_size} does not divide the {world} processes"
            )
        initialize_model_parallel(
            tp_size,
            seed=args.seed,
            distributed_timeout_minutes=timeout / datetime.timedelta(minutes=1),
        )
        self.group, self.rank = mpu.get_data_parallel_group(), mpu.get_data_parallel_rank()
        self.ranks, self.is_main = mpu.get_data_parallel_world_size(), torch.distributed.get_rank() == 0
        self.micro_batch_size, self.global_batch_size = set_batch_sizes(self.config, args, self.ranks)

        try:
            model = build_gpt(
                shape,
                layer_specs.coat_layer_spec if fp8_layers else layer_specs.sdpa_layer_spec,
                seq_length=args.seq_length,
                vocab_size=padded_vocab_size(self.corpus.vocab_size, 128 * tp_size),
                seed=args.seed,
                activations=coat.activations,
                sequence_parallel=args.sequence_parallel,
            )
        except ValueError as error:
            raise LaunchError(str(error)) from error
        mpu.sum_shared_gradients(model)
        checkpoints.leave_out_empty_states(model)
        first = next(self._batches(self.corpus.train, 0))
        saved = saved_bytes(model, lambda: self._loss(model, first))
        # of whole sequences, of which a layer may see a part
        self.saved_bytes = saved.total / (saved.layers * first.tokens.numel())
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

        if not coat.enabled:
            use_torch_adamw(self.config)
        checkpoint = self._find_checkpoint()
        if checkpoint is not None and checkpoint.layout != self.layout:
            self.config.setdefault("checkpoint", {})["load_universal"] = True
        schedule = functools.partial(warmup_cosine, warmup=args.warmup_steps, total=args.steps)
        own_schedule = "scheduler" not in self.config
        self.engine, *_ = coat_ds.initialize(
            model=model,
            model_parameters=parameter_groups(model),
            lr_scheduler=(lambda o: torch.optim.lr_scheduler.LambdaLR(o, schedule)) if own_schedule else None,
            mpu=mpu,
            config=self.config,
        )
        self.step, self.val_loss_start = 0, None
        self.resumed = checkpoint is not None
        if self.resumed:
            self._load(checkpoint)

    @property
    def folder(self) -> Path:
        return Path(self.args.output) / self.run

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoints"

    def train(self, signals: "Signals") -> dict:
        """Trains to the last step; returns what summary.json holds of a run.

        Raises Stopped where a signal came on any rank, once a checkpoint is saved.
        """
        args, metrics, progress = self.args, None, None
        if self.is_main:
            metrics = report.MetricsWriter(
                Path(args.output) / "metrics.jsonl", self.run, self.step if self.resumed else None
            )
            progress = report.Progress(args.steps, self.step, self.run)
            progress.say(self._describe())
        val_loss, speeds, failures = None, [], 0
        try:
            if self.val_loss_start is None:
                self.val_loss_start = val_loss = self._validate(metrics, progress)
            while self.step < args.steps:
                started = time.perf_counter()
                loss = self._train_step()
                seconds = time.perf_counter() - started
                self.step += 1
                speeds.append(self.global_batch_size * args.seq_length / seconds)
                # collective under tensor parallelism; None where DeepSpeed was told not to compute it
                norm = self.engine.get_global_grad_norm()
                finite = math.isfinite(loss) and (norm is None or math.isfinite(norm))
                failures = 0 if finite else failures + 1
                applied = self.engine.was_step_applied()
                lost = not math.isfinite(loss) and (applied or args.non_finite == "stop")
                if lost or failures == MAX_FAILURES:
                    raise LaunchError(
                        f"training diverged: loss {loss} at step {self.step}, loss or gradients not finite "
                        f"in the last {failures} steps; lower --lr or raise --warmup-steps"
                    )
                if self.is_main:
                    values = {"lr": self.engine.get_lr()[0], "tokens_per_s": speeds[-1]}
                    if math.isfinite(loss):
                        values["loss"] = loss
                    if finite and norm is not None:
                        values["grad_norm"] = float(norm)
                    if not finite:
                        done = "applied" if applied else "skipped"
                        values[done] = 1
                        progress.say(f"step {self.step} {done}: loss {loss}, norm of the gradients {norm}")
                    memory = torch.cuda.memory_allocated() if self.device.type == "cuda" else None
                    metrics.write(self.step, **values)
                    progress.update(loss=loss, tokens_per_s=speeds[-1], memory_bytes=memory)
                last = self.step == args.steps
                if last or self.step % args.eval_interval == 0:
                    val_loss = self._validate(metrics, progress)
                stopping = self._any_rank(signals.received) and not last
                if stopping or (args.save_interval and (last or self.step % args.save_interval == 0)):
                    self._save()
                if stopping:
                    raise Stopped(f"stopped by a signal after step {self.step}, saved; go on with --resume")
            if val_loss is None and args.resume:
                # the run before was ended between its last checkpoint and its summary
                val_loss = self._validate(metrics, progress)
        finally:
            if self.is_main:
                metrics.close()
                progress.close()
        if val_loss is None:
            raise LaunchError(
                f"--load: the checkpoint is at step {self.step}, --steps {args.steps} asks for no more"
            )
        return self._summary(val_loss, speeds)

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
        """Over micro-batches and data-parallel ranks."""
        mean = torch.stack(losses).mean()
        torch.distributed.all_reduce(mean, group=self.group)
        return mean.item() / self.ranks

    @staticmethod
    def _on_main(action: Callable[[], object]) -> None:
        """Does it on rank 0. An OutputError ends all ranks."""

        def reason() -> str | None:
            try:
                action()
            except report.OutputError as error:
                return str(error)
            return None

        if (why := checkpoints.from_main(reason)) is not None:
            raise report.OutputError(why)

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

    def _validate(self, metrics, progress) -> float:
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
            metrics.write(self.step, val_loss=val_loss)
            progress.say(f"validation loss {val_loss:.4f} after {self.step} steps")
        return val_loss

    def _data_identity(self) -> dict:
        """What has to be the same for the data to go on where they stopped."""
        return {
            "seed": self.args.seed,
            "seq-length": self.args.seq_length,
            "global-batch-size": self.global_batch_size,
            "training tokens": self.corpus.train.num_tokens,
        }

    @property
    def layout(self) -> checkpoints.Layout:
        stage = self.config.get("zero_optimization", {}).get("stage", 0)
        tensor_ranks = torch.distributed.get_world_size() // self.ranks
        return checkpoints.Layout(self.ranks, tensor_ranks, stage)

    def _save(self) -> None:
        state = {"step": self.step, "val_loss_start": self.val_loss_start, "data": self._data_identity()}
        keep = self.args.keep_checkpoints
        self._on_main(self._lock.check)
        checkpoints.save(self.engine, self.checkpoint_folder, self.step, self.layout, state, keep=keep)

    def _find_checkpoint(self) -> checkpoints.Checkpoint | None:
        """The checkpoint to go on from. Refuses to let an older run's checkpoints pass for this one's."""
        found, folder = None, Path(self.args.load or self.checkpoint_folder)
        if self.args.resume or self.args.load is not None:
            found = checkpoints.find(folder, set_aside=folder.resolve() == self.checkpoint_folder.resolve())
        if found is None and self.args.load is not None:
            raise LaunchError(
                f"--load {folder}: no checkpoint there (none with a {checkpoints.MANIFEST}); drop --load to "
                "start"
            )
        newest = checkpoints.newest(self.checkpoint_folder)
        if newest is not None and (found is None or newest.resolve() != found.path.resolve()):
            raise LaunchError(
                f"--output {self.args.output}: {newest} is there, from an earlier run: go on from it with "
                "--resume, remove it, or choose another folder"
            )
        return found

    def _load(self, checkpoint: checkpoints.Checkpoint) -> None:
        from coat_kernels.weights import invalidate_weight_caches

        state = checkpoints.load(self.engine, checkpoint, self.layout, self.checkpoint_folder)
        # the pass that measured saved_bytes has seen other weights
        invalidate_weight_caches()
        now = self._data_identity()
        with checkpoints.reading(checkpoint.path):
            data = {key: state["data"][key] for key in now}
            self.step, self.val_loss_start = state["step"], float(state["val_loss_start"])
            if self.step != checkpoint.step:
                raise ValueError(f"the files are of step {self.step}")
        for key, value in now.items():
            if data[key] != value:
                raise LaunchError(
                    f"--load {checkpoint.path}: the checkpoint was made with {key} {data[key]}, found "
                    f"{value}: the data would not go on where they stopped"
                )
        if self.is_main:
            print(f"{self.run}: going on from {checkpoint.path}", flush=True)

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

        if self.device.type == "cuda":
            peak, kind = torch.cuda.max_memory_allocated(), report.GPU_PEAK
        else:
            # Linux counts in KiB
            peak, kind = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "process"
        largest = torch.tensor(peak, device=self.device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return {
            "val_loss_start": self.val_loss_start,
            "val_loss": val_loss,
            "state_bytes_per_param": coat_ds.state_bytes(self.engine)["bytes_per_parameter"],
            "saved_bytes_per_token_layer": self.saved_bytes,
            "peak_bytes": largest.item(),
            "peak_kind": kind,
            "tokens_per_s": statistics.median(speeds[WARM_STEPS:] or speeds or [0.0]),
            "steps": self.step,
        }


class Signals:
    """Notes SIGTERM and SIGUSR1, which schedulers send before they end a job."""

    def __init__(self):
        self.received = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number, frame):
        self.received = True


def parameter_groups(model: torch.nn.Module) -> list[dict]:
    """Weight decay for matrices only, as usual for GPTs."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def train_once(args: argparse.Namespace, last: bool = True) -> None:
    """One run in this process; leaves OUTPUT/<run>/summary.json, and the last one what compares all runs.
    Exits with one line for expected errors.
    """
    # what Megatron says about packages that nothing here needs, and torch about calls that DeepSpeed makes
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    from coat_ds import CoatConfigError

    trainer, signals, lock = None, Signals(), OutputLock(args.output)
    try:
        report.prepare_folder(args.output)
        trainer = Trainer(args, lock)
        report.prepare_folder(trainer.folder)
        # of an earlier run: it must not stand for one that fails now
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
        sys.exit(130)
    finally:
        lock.release()


def compare(args: argparse.Namespace) -> None:
    """Both runs, each in a fresh process, so that each has its own peak memory."""
    port = int(os.environ.get("MASTER_PORT", 29500))
    for index, run in enumerate(RUNS):
        if "WORLD_SIZE" in os.environ:
            # the launcher's store still holds the keys of the run before
            os.environ.update(MASTER_PORT=str(port + 1 + index), TORCHELASTIC_USE_AGENT_STORE="False")
        process = multiprocessing.get_context("spawn").Process(
            target=train_once,
            args=(argparse.Namespace(**{**vars(args), "variant": run}), run == RUNS[-1]),
        )
        process.start()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _, process=process: os.kill(process.pid, number))
        try:
            process.join()
        except KeyboardInterrupt:
            # the terminal has told the child as well
            process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


def conclude(output: Path) -> None:
    """Summary, table and plot of all runs in the folder."""
    found = [run for run in RUNS if (output / run / "summary.json").exists()]
    summary = {run: report.read_summary(output / run / "summary.json") for run in found}
    report.write_summary(output / "summary.json", summary)
    print(f"\n{report.comparison_table(summary)}\n")
    try:
        report.plot_runs(report.read_metrics(output / "metrics.jsonl"), summary, output / "loss.png")
        print(f"metrics.jsonl, loss.png and summary.json are in {output}")
    except ModuleNotFoundError as error:
        print(f"metrics.jsonl and summary.json are in {output}; for loss.png: pip install {error.name}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        read_ranks(os.environ)
        (compare if args.compare else train_once)(args)
    except SystemExit as end:
        # torchrun would take it for a failure and start again, into the scheduler's end
        if end.code == STOPPED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
            sys.exit(0)
        raise
    except LaunchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
