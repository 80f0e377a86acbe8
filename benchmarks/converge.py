"""The loss of BF16 and of COAT on real text, over seeds and parts of COAT, at equal steps.

A run is named after what is trained and its seed: `bf16-seed2`, `coat-optimizer-seed1`; without a seed it is
number 1. `bf16-to-coat` and `coat-to-bf16` change over half-way, through a checkpoint. Each run leaves two
files in a folder beside the table: `NAME.jsonl` with a line for each step, and, when it is complete,
`NAME.json`. Runs with the same data and recipe that are complete there, or in `benchmarks/results`, are not
made again.
"""

import argparse
import functools
import gc
import hashlib
import json
import math
import re
import shutil
import statistics
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch

from benchmarks import corpus
from benchmarks.harness import RESULTS, Table, benchmark, reason, synchronize
from benchmarks.training import BETAS, CONFIGS, EPS, WEIGHT_DECAY, loss_of
from benchmarks.whole_models import SYSTEMS, System, bf16_section, coat_section
from benchmarks.zero import PATIENCE
from coat_launch.data import padded_vocab_size
from coat_launch.report import MetricsWriter, atomic_write, read_metrics, write_summary

BF16 = "bf16"
# plain FP8 in place of dynamic range expansion
_PLAIN = {"exp_avg_format": "fp8", "exp_avg_sq_format": "fp8"}
# the paper's format of both moments
_PAPER = {"exp_avg_format": "fp8_expanded", "exp_avg_sq_format": "fp8_expanded"}
VARIANTS = {
    BF16: SYSTEMS["BF16"],
    "coat": SYSTEMS["COAT"],
    "coat-paper": System({"optimizer": _PAPER}),
    "coat-optimizer": System({"activations": {"enabled": False}}),
    "coat-activations": System({"optimizer": {"enabled": False}}),
    "coat-no-expansion": System({"optimizer": _PLAIN}),
    "coat-fastest": SYSTEMS["COAT, fastest"],
    "coat-smallest": SYSTEMS["COAT, smallest"],
}
# from one to the other after half of the steps
CHANGES = {"bf16-to-coat": (BF16, "coat"), "coat-to-bf16": ("coat", BF16)}
# the most telling first, should there be time for some only
RUNS = [f"{variant}-seed{seed}" for seed in (1, 2, 3) for variant in (BF16, "coat")]
RUNS += [f"{kind}-seed1" for kind in (*list(VARIANTS)[2:], *CHANGES)]
# what moments are stored in, activations in BF16: asked for by name, with beta2 0.95 and with 0.999
_STORED = {
    "coat-optimizer": {},
    "coat-optimizer-paper": _PAPER,
    "coat-optimizer-fp32": {"exp_avg_format": "fp32", "exp_avg_sq_format": "fp32"},
}
LONG_MEMORY, LONG_BETAS = "-beta2-0.999", (0.9, 0.999)
VARIANTS |= {
    name + memory: System({"optimizer": formats, "activations": {"enabled": False}})
    for name, formats in _STORED.items()
    for memory in ("", LONG_MEMORY)
}
VALIDATIONS = 10
# steps between two looks at the losses, for which the host has to wait
LOOK = 20


class Recipe(NamedTuple):
    """What is trained, and how."""

    shape_file: Path
    vocabulary: int
    seq_length: int
    batch: int
    """Sequences in a step."""
    held_out: int
    """Sequences in a validation."""
    tokens: int
    """In a run, rounded up to whole steps."""
    text: int
    """Bytes of text at most."""
    lr: float
    clip: float = 1.0
    warmup: float = 0.1
    """Share of the steps; then half a cosine down to a tenth."""

    @property
    def steps(self) -> int:
        return -(-self.tokens // (self.batch * self.seq_length))


FULL = Recipe(
    CONFIGS / "model_125m.json", 32768, 1024, 64, held_out=512, tokens=150_000_000, text=1 << 30, lr=6e-4
)
TINY = Recipe(CONFIGS / "model_quickstart.json", 512, 32, 4, held_out=8, tokens=768, text=2 << 20, lr=2e-3)


class Run(NamedTuple):
    kind: str
    variants: tuple[str, ...]
    """One after the other, for equal shares of the steps."""
    seed: int

    @classmethod
    def parse(cls, name: str) -> "Run":
        """Raises ValueError, naming the known ones, for a name that is none."""
        stem, seed = re.fullmatch(r"(.+?)(?:-seed(\d+))?", name).groups()
        if stem not in VARIANTS and stem not in CHANGES:
            known = ", ".join([*VARIANTS, *CHANGES])
            raise ValueError(f"--runs {name}: expected one of {known}, with or without -seedN behind it")
        return cls(stem, CHANGES.get(stem, (stem,)), int(seed or 1))

    @property
    def name(self) -> str:
        return f"{self.kind}-seed{self.seed}"

    def phase(self, step: int, steps: int) -> tuple[str, int]:
        """What is trained after `step` steps, and the step at which that ends."""
        count = len(self.variants)
        index = min(step * count // steps, count - 1)
        return self.variants[index], -(-(index + 1) * steps // count)


class Setup(NamedTuple):
    """What is the same for all runs of a call."""

    recipe: Recipe
    micro_batch: int
    data: Path
    """Folder that `corpus.prepare` made."""
    runs: Path
    """Where unfinished runs stay: their lines, and checkpoints of their own."""
    deadline: float
    """By `time.monotonic`."""


def conditions_of(recipe: Recipe, micro_batch: int, data: Path) -> dict[str, object]:
    """What runs have to share to be compared."""
    shape = {"shape_file": recipe.shape_file.name}
    identity = corpus.load(data, recipe.seq_length, 0).identity
    return recipe._asdict() | shape | {"micro_batch": micro_batch} | identity


class Progress(NamedTuple):
    """Of an unfinished run; lies in its checkpoint."""

    step: int = 0
    seconds: float = 0.0
    """Spent on training, without validations."""
    peak: int = 0
    """Bytes over what was held before the model."""


def host_config(variant: str, recipe: Recipe, micro_batch: int) -> dict:
    """The DeepSpeed JSON."""
    from coat_ds import CoatConfig
    from coat_launch.deepspeed_config import use_torch_adamw

    betas = LONG_BETAS if variant.endswith(LONG_MEMORY) else BETAS
    params = {"lr": recipe.lr, "betas": list(betas), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "train_batch_size": recipe.batch,
        "gradient_clipping": recipe.clip,
        "steps_per_print": 10**9,
        "bf16": bf16_section(VARIANTS[variant]),
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": params},
        "coat": coat_section(VARIANTS[variant]),
    }
    coat = CoatConfig.from_dict(config["coat"])
    if not (coat.enabled and coat.optimizer.enabled):
        use_torch_adamw(config)
    return config


def build_engine(run: Run, variant: str, setup: Setup, vocab_size: int):
    """A DeepSpeed engine around megatron-core's GPTModel, as `launch/pretrain_gpt.py` makes them."""
    import coat_ds
    from coat_launch.model import parameter_groups, warmup_cosine
    from megatron_ext import layer_specs, mpu
    from megatron_ext.model import build_gpt, load_shape

    recipe = setup.recipe
    config = host_config(variant, recipe, setup.micro_batch)
    coat = coat_ds.CoatConfig.from_dict(config["coat"])
    model = build_gpt(
        load_shape(recipe.shape_file),
        layer_specs.coat_layer_spec
        if coat.enabled and coat.activations.enabled
        else layer_specs.sdpa_layer_spec,
        seq_length=recipe.seq_length,
        vocab_size=padded_vocab_size(vocab_size),
        seed=run.seed,
        activations=coat.activations,
    )
    schedule = functools.partial(warmup_cosine, warmup=int(recipe.warmup * recipe.steps), total=recipe.steps)
    engine, *_ = coat_ds.initialize(
        model=model,
        model_parameters=parameter_groups(model),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule),
        mpu=mpu,
        config=config,
    )
    return engine


def validate(engine, text: corpus.TokenizedText, setup: Setup) -> float:
    """Mean loss, in nats per token, of the same held-out sequences every time."""
    count = min(setup.recipe.held_out, len(text.held_out))
    engine.eval()
    with torch.no_grad():
        sums = [
            loss_of(engine, text.held_out.batch(range(first, last))) * (last - first)
            for first in range(0, count, setup.micro_batch)
            for last in [min(first + setup.micro_batch, count)]
        ]
    engine.train()
    return torch.stack(sums).sum().item() / count


def train_phase(
    engine, text: corpus.TokenizedText, setup: Setup, progress: Progress, until: int, metrics: MetricsWriter
) -> Progress:
    """Trains until a step or the deadline, whichever comes first, but one step at least.

    Raises ArithmeticError if the loss is not finite.
    """
    recipe, steps = setup.recipe, setup.recipe.steps
    every = max(1, steps // VALIDATIONS)
    step, seconds, seen, started = progress.step, progress.seconds, [], time.perf_counter()

    def look() -> float:
        """Writes what was seen of the last steps down; returns the seconds that they took."""
        # the host waits for the device here
        last = seen[-1][1].item()
        elapsed = time.perf_counter() - started
        speed = len(seen) * recipe.batch * recipe.seq_length / elapsed
        for at, loss, norm in seen:
            if not math.isfinite(loss):
                raise ArithmeticError(f"the loss is {loss.item()} at step {at}")
            more = {"tokens_per_s": round(speed)} if at == step else {}
            metrics.write(at, loss=round(loss.item(), 5), grad_norm=round(float(norm), 5), **more)
        print(f"step {step} of {steps}: loss {last:.4f}, {speed:,.0f} tokens/s", flush=True)
        seen.clear()
        return elapsed

    while step < until:
        losses = []
        batches = text.train.micro_batches(
            step * recipe.batch, global_batch_size=recipe.batch, micro_batch_size=setup.micro_batch
        )
        for batch in batches:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        step += 1
        seen.append((step, torch.stack(losses).mean(), engine.get_global_grad_norm()))
        late = time.monotonic() > setup.deadline
        if step % every == 0 or step == until or late or len(seen) == LOOK:
            seconds += look()
            if step % every == 0 or step == steps:
                val_loss = validate(engine, text, setup)
                metrics.write(step, val_loss=round(val_loss, 5))
                print(f"step {step} of {steps}: validation loss {val_loss:.4f}", flush=True)
            started = time.perf_counter()
        if late:
            break
    return Progress(step, seconds, progress.peak)


def saved_by_layers(engine, text: corpus.TokenizedText, setup: Setup) -> float:
    """Bytes per token and layer, of one forward without a backward."""
    from megatron_ext.ledger import saved_bytes

    batch = text.train.batch(range(setup.micro_batch))
    return saved_bytes(engine.module, lambda: loss_of(engine.module, batch)).per_token_and_layer


def make_run(run: Run, setup: Setup, conditions: dict, environment: dict) -> bool:
    """Goes on with a run until it is complete or time is over; returns whether it is complete.

    A run whose loss is not finite is complete, and has a `note`.
    """
    import coat_ds

    recipe = setup.recipe
    text = corpus.load(setup.data, recipe.seq_length, run.seed)
    checkpoints = setup.runs / "checkpoints" / run.name
    latest = checkpoints / "progress.json"
    progress = Progress(**json.loads(latest.read_text())) if latest.exists() else Progress()
    metrics = MetricsWriter(setup.runs / f"{run.name}.jsonl", run.name, progress.step or None)
    result: dict[str, object] = {}
    try:
        while progress.step < recipe.steps and not result:
            variant, until = run.phase(progress.step, recipe.steps)
            print(f"{run.name}: {variant} from step {progress.step} of {recipe.steps}", flush=True)
            gc.collect()
            on_gpu = torch.cuda.is_available()
            before = torch.cuda.memory_allocated() if on_gpu else 0
            engine = build_engine(run, variant, setup, text.vocab_size)
            if progress.step:
                engine.load_checkpoint(str(checkpoints))
            else:
                metrics.write(0, val_loss=round(validate(engine, text, setup), 5))
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            try:
                progress = train_phase(engine, text, setup, progress, until, metrics)
            except ArithmeticError as error:
                result["note"] = f"{variant}: {error}"
            synchronize()
            peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
            progress = progress._replace(peak=max(progress.peak, peak))
            if progress.step == recipe.steps:
                result["saved_bytes_per_token_layer"] = saved_by_layers(engine, text, setup)
                result["state_bytes_per_param"] = coat_ds.state_bytes(engine)["bytes_per_parameter"]
                result["parameters"] = sum(p.numel() for p in engine.module.parameters())
            elif not result:
                # the marker goes first and comes last: a checkpoint that was cut off by a crash is none
                latest.unlink(missing_ok=True)
                engine.save_checkpoint(str(checkpoints), tag="last")
                atomic_write(latest, json.dumps(progress._asdict()).encode())
            engine.destroy()
            del engine
            if on_gpu:
                torch.cuda.empty_cache()
            if time.monotonic() > setup.deadline and progress.step < recipe.steps and not result:
                print(f"{run.name}: time is over after step {progress.step} of {recipe.steps}", flush=True)
                return False
    finally:
        metrics.close()
    lines = read_metrics(setup.runs / f"{run.name}.jsonl")
    validations = [line["val_loss"] for line in lines if "val_loss" in line]
    speeds = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    result |= {
        "val_loss_start": validations[0],
        "val_loss": validations[-1] if "note" not in result else math.nan,
        "train_s": progress.seconds,
        "tokens_per_s": statistics.median(speeds) if speeds else math.nan,
        "peak_mb": progress.peak / 1e6,
    }
    write_summary(
        setup.runs / f"{run.name}.json",
        {"conditions": conditions, "result": result, "environment": environment},
    )
    shutil.rmtree(checkpoints, ignore_errors=True)
    return True


def complete_runs(folders: list[Path], conditions: dict) -> dict[str, Path]:
    """Where each complete run under these conditions lies, without suffix, the first folder first."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            if different := _differences(path, conditions):
                print(f"{path}: other {', '.join(different)}; not counted", flush=True)
            else:
                found.setdefault(path.stem, path.with_suffix(""))
    return found


def _differences(path: Path, conditions: dict) -> list[str]:
    """Conditions in which a complete run differs from these."""
    made = json.loads(path.read_text())["conditions"]
    return [name for name, value in conditions.items() if made.get(name) != value]


def rows_of(runs: dict[str, Path]) -> list[dict]:
    """A row for each complete run, in the order of RUNS, beside BF16."""
    results = {name: json.loads(path.with_suffix(".json").read_text()) for name, path in runs.items()}
    loss = {name: found["result"]["val_loss"] for name, found in results.items()}
    baseline = [value for name, value in loss.items() if Run.parse(name).kind == BF16]
    rows = []
    for name in sorted(results, key=lambda name: (RUNS.index(name) if name in RUNS else len(RUNS), name)):
        run, found = Run.parse(name), results[name]
        row = {"run": run.kind, "seed": run.seed, "steps": Recipe(**_recipe(found)).steps}
        row |= {"tokens": found["conditions"]["tokens"], **found["result"]}
        if baseline:
            row["to_bf16_mean"] = loss[name] / statistics.mean(baseline) - 1
        if (same := loss.get(f"{BF16}-seed{run.seed}")) is not None:
            row["to_bf16_same_seed"] = loss[name] / same - 1
        rows.append(row | {k: v for k, v in found["conditions"].items() if k != "tokens"})
        rows[-1] |= found["environment"]
    return rows


def _recipe(found: dict) -> dict:
    return {name: found["conditions"][name] for name in Recipe._fields}


def summary(rows: list[dict]) -> list[dict]:
    """Of each kind of run: mean and spread of the validation losses, and the mean's distance to BF16's."""
    losses: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        losses[row["run"]].append(float(row["val_loss"]))
    baseline = statistics.mean(losses[BF16]) if losses[BF16] else math.nan
    return [
        {
            "run": kind,
            "seeds": len(values),
            "val_loss": statistics.mean(values),
            "lowest": min(values),
            "highest": max(values),
            "to_bf16": statistics.mean(values) / baseline - 1,
        }
        for kind, values in losses.items()
        if values
    ]


def plot(runs: dict[str, Path], path: Path) -> None:
    """Validation losses over tokens, and their distance to BF16 of the same seed."""
    colors = {kind: f"C{i}" for i, kind in enumerate([*VARIANTS, *CHANGES])}
    curves = {}
    for name, stem in runs.items():
        batch = json.loads(stem.with_suffix(".json").read_text())["conditions"]
        per_step = batch["batch"] * batch["seq_length"] / 1e6
        lines = [r for r in read_metrics(stem.with_suffix(".jsonl")) if "val_loss" in r]
        curves[name] = {per_step * r["step"]: r["val_loss"] for r in lines}
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    drawn = set()
    for name, curve in curves.items():
        run = Run.parse(name)
        style = {"color": colors[run.kind], "marker": ".", "alpha": 0.8}
        label = {} if run.kind in drawn else {"label": run.kind}
        drawn.add(run.kind)
        after = {x: y for x, y in curve.items() if x > 0}
        panels[0].plot(after.keys(), after.values(), **style, **label)
        same = curves.get(f"{BF16}-seed{run.seed}", {})
        if run.kind != BF16 and (shared := [x for x in after if x in same]):
            panels[1].plot(shared, [100 * (after[x] / same[x] - 1) for x in shared], **style)
    panels[0].set(xlabel="10^6 tokens", ylabel="validation loss, nats per token")
    panels[1].set(xlabel="10^6 tokens", ylabel="distance to BF16 of the same seed, %")
    panels[1].axhline(0, color="black", linewidth=0.8)
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", nargs="+", default=RUNS, help="in this order; default: " + " ".join(RUNS))
    add("--tokens", type=float, help="in a run (default 1.5e8)")
    add("--minutes", type=float, default=math.inf, help="stop then, to go on at the next call")
    add("--micro-batch", type=int, help="sequences in a pass (default: all of a step, 64)")
    add("--work", type=Path, default=Path("runs/converge"), help="token ids, unfinished runs, checkpoints")
    add("--text", type=Path, nargs="+", help="folders of text in place of the installed packages")
    add("--collect", action="store_true", help="train nothing: table and plot of the runs beside --output")


@benchmark(needs_gpu=False, options=options)
def converge(arguments, table: Table) -> None:
    """The 125M model on the text of installed packages: BF16 over seeds, COAT over seeds and in parts.

    12 layers, h 768, sequence 1024, 64 sequences a step, byte-pair tokenizer of 32,768 trained on the spot,
    files held out by the hash of their content. AdamW 0.9, 0.95, or 0.999 in runs named so, weight decay
    0.1 of matrices, clip 1.0, peak 6e-4 after a tenth of the steps, cosine to a tenth; BF16 weights and
    FP32 masters under ZeRO-1, on one GPU. A seed decides weights and the order of the data. Runs with the
    same data and recipe that are complete in benchmarks/results, beside --output or in --work are not made
    again; --minutes stops in the middle of one, and the next call with the same --work goes on there, to
    the same bits. Columns:
    - val_loss_start, val_loss: of 512 held-out sequences, nats per token, by the layers that were trained;
    - to_bf16_mean, to_bf16_same_seed: relative distance to BF16's mean, and to BF16 of that seed;
    - train_s: without validations, with compiling kernels; tokens_per_s: median over twenty steps at a time,
      with reading the data; peak_mb: over what was held before the model, in 10^6 bytes;
    - saved_bytes_per_token_layer: kept for backward by the layers; state_bytes_per_param: of the optimizer;
    - manifest, tokenizer: the hashes of the list of files, which stays in --work, and of the tokenizer.
    Without a GPU, or with --quick, the quickstart's model for a few steps. On a CPU there are no peaks.
    """
    from coat_launch.process_group import start_process_group
    from megatron_ext.model import initialize_model_parallel

    started, output = time.monotonic(), table.path.with_suffix("")
    if arguments.collect:
        publish(output, table)
        return
    runs = [Run.parse(name) for name in arguments.runs]
    recipe = TINY if arguments.quick or not torch.cuda.is_available() else FULL
    if arguments.tokens is not None:
        recipe = recipe._replace(tokens=int(arguments.tokens))
    micro_batch = arguments.micro_batch or recipe.batch
    if recipe.batch % micro_batch:
        raise SystemExit(
            f"--micro-batch: {micro_batch} does not divide the {recipe.batch} sequences of a step"
        )
    work = arguments.work
    roots = arguments.text or corpus.installed_roots()
    data = work / f"text-{corpus.name_of(roots, recipe.vocabulary, recipe.text)}"
    try:
        corpus.prepare(data, roots, recipe.vocabulary, recipe.text)
        conditions = conditions_of(recipe, micro_batch, data)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"text ready after {time.monotonic() - started:.0f} s in {data}", flush=True)
    print("  ".join(f"{k} {v}" for k, v in conditions.items()), flush=True)
    output.mkdir(parents=True, exist_ok=True)
    if others := [path for path in output.glob("*.json") if _differences(path, conditions)]:
        raise SystemExit(
            f"{others[0]} was made with other {', '.join(_differences(others[0], conditions))}: what cannot "
            "be compared would share a folder, give another with --output"
        )
    digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:8]
    setup = Setup(recipe, micro_batch, data, work / f"runs-{digest}", started + 60 * arguments.minutes)
    setup.runs.mkdir(exist_ok=True)
    known = complete_runs([output, RESULTS / output.name, setup.runs], conditions)
    start_process_group(PATIENCE)
    initialize_model_parallel()
    started_one = False
    for run in runs:
        if run.name in known:
            print(f"{run.name}: complete in {known[run.name].parent}", flush=True)
        elif started_one and time.monotonic() > setup.deadline:
            print(f"{run.name}: no time left", flush=True)
        else:
            started_one = True
            try:
                if make_run(run, setup, conditions, table.environment):
                    known[run.name] = setup.runs / run.name
            # one that fails leaves the others standing
            except Exception as error:
                traceback.print_exc()
                print(f"{run.name}: {reason(error)}", flush=True)
            _carry(setup.runs / run.name, output)
    torch.distributed.destroy_process_group()

    for stem in known.values():
        _carry(stem, output)
    publish(output, table)


def publish(folder: Path, table: Table) -> None:
    """Adds a row for each complete run in the folder, and draws them all."""
    runs = {path.stem: path.with_suffix("") for path in sorted(folder.glob("*.json"))}
    rows = rows_of(runs)
    for row in rows:
        table.add(**row)
    for row in summary(rows):
        print("  ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if rows:
        plot(runs, table.path.with_suffix(".png"))


def _carry(stem: Path, folder: Path) -> None:
    """Copies a run's files, complete or not, into a folder."""
    for suffix in (".jsonl", ".json"):
        source, target = stem.with_suffix(suffix), folder / (stem.name + suffix)
        if source.exists() and not (target.exists() and target.samefile(source)):
            shutil.copyfile(source, target)
