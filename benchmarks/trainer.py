"""Whole models of transformers under the unmodified Trainer with DeepSpeed, in BF16 and with the block."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import coat_ds
from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark
from benchmarks.common.timing import synchronize
from benchmarks.common.wide_models import SHAPES

ROOT = Path(__file__).parents[1]
# steps that are not timed: the first compile, and DeepSpeed makes its states in them
WARMUP = 3
# what the DeepSpeed JSON has in addition, and arguments of Trainer
SYSTEMS = {
    "BF16": ({}, {}),
    "BF16, Liger": ({}, {"use_liger_kernel": True}),
    "COAT": ({"coat": {"enabled": True, "require": True}}, {}),
    "COAT, Liger": ({"coat": {"enabled": True, "require": True}}, {"use_liger_kernel": True}),
    "COAT, 8-bit attention": (
        {"coat": {"enabled": True, "require": True, "activations": {"attention_format": "sqrt8"}}},
        {},
    ),
}
LAYERS, VOCABULARY = 32, 128256
QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


class _Tokens(torch.utils.data.Dataset):
    """Rows of random tokens; of several documents, if `documents` is not 1."""

    def __init__(self, length: int, vocabulary: int, documents: int):
        self.length, self.vocabulary, self.documents = length, vocabulary, documents

    def __len__(self):
        return 1024

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(self.vocabulary, (self.length,), generator=generator)
        if self.documents == 1:
            return {"input_ids": ids, "labels": ids}
        # documents of random lengths: positions begin again at each
        borders = (
            (torch.randperm(self.length - 1, generator=generator)[: self.documents - 1] + 1).sort().values
        )
        lengths = torch.tensor([0, *borders, self.length]).diff()
        positions = torch.cat([torch.arange(length) for length in lengths])
        return {"input_ids": ids, "labels": ids, "position_ids": positions}


def _training_arguments(settings: dict):
    import transformers

    block, further = SYSTEMS[settings["system"]]
    params = {"lr": "auto", "betas": "auto", "weight_decay": "auto", "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": settings["stage"]},
        "optimizer": {"type": "AdamW", "params": params},
        **block,
    }
    return transformers.TrainingArguments(
        output_dir=settings["folder"],
        max_steps=settings["steps"] + WARMUP,
        per_device_train_batch_size=settings["micro_batch"],
        deepspeed=config,
        bf16=True,
        learning_rate=1e-4,
        adam_beta2=0.95,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        **further,
    )


def _model(settings: dict) -> torch.nn.Module:
    """With random weights, the same on every rank."""
    import transformers

    fields = dict(SHAPES[settings["shape"]].fields)
    fields |= {"num_hidden_layers": settings["layers"], "vocab_size": VOCABULARY, "use_cache": False}
    if settings["quick"]:
        fields |= QUICK | {"vocab_size": 512, "head_dim": 16}
    shape = getattr(transformers, SHAPES[settings["shape"]].config)(**fields)
    torch.manual_seed(0)
    with device():
        return transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)


def run_rank(settings: dict) -> None:
    """Trains on this rank; the first writes what it found to a file."""
    import transformers

    marks, on_gpu = [], torch.cuda.is_available()

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            synchronize()
            if on_gpu and len(marks) == WARMUP:
                torch.cuda.reset_peak_memory_stats()
            marks.append(time.perf_counter())

    # what the entry point does where the package is installed; a checkout may be on the path alone
    coat_ds.install()
    # first: transformers builds the model as its DeepSpeed config says
    arguments = _training_arguments(settings)
    model = _model(settings)
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=_Tokens(settings["sequence"], model.config.vocab_size, settings["documents"]),
        callbacks=[Clock()],
    )
    trainer.train()
    synchronize()
    marks.append(time.perf_counter())
    times = [1e3 * (b - a) for a, b in zip(marks[WARMUP:], marks[WARMUP + 1 :], strict=False)]
    found = {"ms": statistics.median(times), "parameters": sum(p.numel() for p in model.parameters())}
    if on_gpu:
        found["peak_mb"] = torch.cuda.max_memory_allocated() / 1e6
    found["loss"] = [line["loss"] for line in trainer.state.log_history if "loss" in line][-1]
    if trainer.is_world_process_zero():
        Path(settings["folder"], "found.json").write_text(json.dumps(found))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "vlm"], default="llama3-8b")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=1, help="in a row; more than one: a packed batch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))


@benchmark(needs_gpu=False, options=options)
def trainer(arguments, table: Table) -> None:
    """A whole model of transformers under its unmodified Trainer with DeepSpeed; random weights and tokens.

    Each system is processes of its own; what differs is the block in the DeepSpeed JSON, or Trainer's
    `use_liger_kernel`. Milliseconds are a step's, the median; the peak is rank 0's. order: which of the
    call's processes it was; COAT's was up to a tenth slower where it came first.
    """
    quick = {"layers": 2, "sequence": 64, "steps": 2} if arguments.quick else {}
    names = ("shape", "stage", "layers", "micro_batch", "sequence", "documents", "steps")
    common = {name: getattr(arguments, name) for name in names} | quick
    for order, system in enumerate(arguments.systems, 1):
        row = {"system": system, "order": order, "gpus": arguments.gpus, **common}
        with tempfile.TemporaryDirectory() as folder:
            settings = common | {"system": system, "folder": folder, "quick": bool(quick)}
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [
                f"--nproc-per-node={arguments.gpus}",
                "-m",
                "benchmarks.trainer",
                json.dumps(settings),
            ]
            run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
            log, found = run.stdout + run.stderr, Path(folder, "found.json")
            lines = [line for line in log.splitlines() if "COAT:" in line or "Error:" in line]
            print(*lines[-6:], sep="\n", flush=True)
            if found.exists():
                row |= json.loads(found.read_text())
                row["tokens_per_s_gpu"] = common["micro_batch"] * common["sequence"] / row["ms"] * 1e3
            else:
                row["note"] = (lines or log.splitlines())[-1][:160]
        table.add(**row)


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]))
