"""A run: trained, validated, stopped and resumed."""

import functools
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common.memory import release
from benchmarks.common.timing import synchronize
from benchmarks.common.training import BETAS, EPS, WEIGHT_DECAY, loss_of
from benchmarks.common.whole_models import bf16_section, coat_section
from benchmarks.converge import corpus
from benchmarks.converge.recipe import (
    BF16,
    LONG_BETAS,
    LONG_MEMORY,
    VALIDATIONS,
    VARIANTS,
    Recipe,
    Run,
    Setup,
    Task,
)
from coat_launch.data import padded_vocab_size
from coat_launch.files import atomic_write
from coat_launch.report import MetricsWriter, read_metrics, write_summary

# steps between two looks at the losses, which wait for the GPU
LOOK = 20


class Progress(NamedTuple):
    """State of an unfinished run; lies in its checkpoint."""

    step: int = 0
    seconds: float = 0.0
    """Spent on training, without validations."""
    peak: int = 0
    """Bytes over what was held before the model."""


def deepspeed_config(variant: str, recipe: Recipe) -> dict:
    """The DeepSpeed JSON."""
    from coat_ds import CoatConfig
    from coat_launch.deepspeed_config import use_torch_adamw

    betas = LONG_BETAS if variant.endswith(LONG_MEMORY) else BETAS
    params = {"lr": recipe.lr, "betas": list(betas), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    config = {
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
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


def load_text(setup: Setup, seed: int) -> corpus.TokenizedText:
    return corpus.load(setup.data, setup.recipe.seq_length, seed)


def build_gpt_of_recipe(
    setup: Setup, run: Run, coat, text: corpus.TokenizedText, **config
) -> torch.nn.Module:
    from megatron_ext.model import load_shape

    return gpt_of(load_shape(setup.recipe.shape_file), setup, run, coat, text.vocab_size, **config)


def gpt_of(shape, setup: Setup, run: Run, coat, vocab_size: int, **config) -> torch.nn.Module:
    """megatron-core's GPTModel of a `ModelShape` as `launch/pretrain_gpt.py` makes it.

    config: further fields of Megatron's TransformerConfig.
    """
    from megatron_ext import layer_specs
    from megatron_ext.model import build_gpt

    return build_gpt(
        shape,
        layer_specs.coat_layer_spec
        if coat.enabled and coat.activations.enabled
        else layer_specs.sdpa_layer_spec,
        seq_length=setup.recipe.seq_length,
        vocab_size=padded_vocab_size(vocab_size),
        seed=run.seed,
        activations=coat.activations,
        **config,
    )


def build_engine(run: Run, variant: str, setup: Setup, data):
    """A DeepSpeed engine around the task's model."""
    import deepspeed

    import coat_ds
    from coat_launch.model import parameter_groups, warmup_cosine
    from megatron_ext import mpu

    recipe = setup.recipe
    config = deepspeed_config(variant, recipe)
    model = setup.task.build(setup, run, coat_ds.CoatConfig.from_dict(config["coat"]), data)
    schedule = functools.partial(warmup_cosine, warmup=int(recipe.warmup * recipe.steps), total=recipe.steps)
    coat_ds.install()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule),
        mpu=mpu,
        config=config,
    )
    return engine


def held_out_loss(model: torch.nn.Module, data, setup: Setup) -> float:
    """Mean, in nats per token, of the same held-out sequences every time."""
    count, size = min(setup.recipe.held_out, len(data.held_out)), setup.recipe.micro_batch
    sums = [
        setup.task.loss(model, data.held_out.batch(range(first, last))) * (last - first)
        for first in range(0, count, size)
        for last in [min(first + size, count)]
    ]
    return round(torch.stack(sums).sum().item() / count, 5)


def losses_by_layers(
    trained: torch.nn.Module, build: Callable[..., torch.nn.Module], data, setup: Setup
) -> dict[str, float]:
    """The held-out losses of one model's weights in stock layers and in COAT's as they are by default.

    build(coat): a model with the parameters of `trained`, whatever their values, and the layers that a
    `coat_ds.CoatConfig` names.
    """
    import coat_ds

    weights, found = dict(trained.named_parameters()), {}
    for name, fp8 in (("val_loss_bf16", False), ("val_loss_fp8", True)):
        model = build(coat_ds.CoatConfig(enabled=fp8))
        with torch.no_grad():
            for parameter, p in model.named_parameters():
                p.copy_(weights[parameter])
        found[name] = held_out_loss(model.eval(), data, setup)
    return found


def by_layers_at_the_end(setup: Setup, engine: torch.nn.Module, text, step: int) -> dict[str, float]:
    """As `Task.scores`: after the last step, the losses by layers."""
    if step != setup.recipe.steps:
        return {}

    def build(coat) -> torch.nn.Module:
        # to draw a billion weights takes longer than to validate them
        return build_gpt_of_recipe(setup, Run.parse(BF16), coat, text, perform_initialization=False)

    return losses_by_layers(engine.module, build, text, setup)


@torch.no_grad()
def validate(engine, data, setup: Setup, step: int) -> dict[str, float]:
    """The held-out loss and the scores."""
    engine.eval()
    found = {"val_loss": held_out_loss(engine, data, setup)}
    found |= setup.task.scores(setup, engine, data, step)
    engine.train()
    return found


def train_phase(
    run: Run,
    engine,
    data,
    setup: Setup,
    progress: Progress,
    until: int,
    metrics: MetricsWriter,
) -> Progress:
    """Trains until a step or the deadline, whichever comes first, but one step at least.

    Raises ArithmeticError if the loss is not finite.
    """
    recipe, steps = setup.recipe, setup.recipe.steps
    every = max(1, steps // VALIDATIONS)
    step, seconds, seen, started = progress.step, progress.seconds, [], time.perf_counter()

    def look() -> float:
        """Writes what was seen of the last steps down; returns the seconds that they took."""
        # the CPU waits for the GPU here
        last = seen[-1][1].item()
        elapsed = time.perf_counter() - started
        speed = len(seen) * recipe.batch * recipe.seq_length / elapsed
        for at, loss, norm in seen:
            if not math.isfinite(loss):
                raise ArithmeticError(f"the loss is {loss.item()} at step {at}")
            more = {"tokens_per_s": round(speed)} if at == step else {}
            metrics.write(at, loss=round(loss.item(), 5), grad_norm=round(float(norm), 5), **more)
        print(f"{run.name}: step {step} of {steps}: loss {last:.4f}, {speed:,.0f} tokens/s", flush=True)
        seen.clear()
        return elapsed

    while step < until:
        losses = []
        batches = data.train.micro_batches(
            step * recipe.batch, global_batch_size=recipe.batch, micro_batch_size=recipe.micro_batch
        )
        for batch in batches:
            loss = setup.task.loss(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        step += 1
        seen.append((step, torch.stack(losses).mean(), engine.get_global_grad_norm()))
        late = time.monotonic() > setup.deadline
        if step % every == 0 or step == until or late or len(seen) == LOOK:
            seconds += look()
            if step % every == 0 or step == steps:
                found = validate(engine, data, setup, step)
                metrics.write(step, **found)
                print(
                    f"{run.name}: step {step} of {steps}: validation loss {found['val_loss']:.4f}", flush=True
                )
            started = time.perf_counter()
        if late:
            break
    return Progress(step, seconds, progress.peak)


def saved_by_layers(model: torch.nn.Module, batch) -> dict[str, float]:
    """What the layers keep of one forward without a backward; they are the model's first list of modules."""
    from megatron_ext.saved_bytes import saved_bytes

    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    saved = saved_bytes(list(layers), lambda: loss_of(model, batch))
    return {"saved_bytes_per_token_layer": saved.per_token_and_layer}


def make_run(run: Run, setup: Setup, conditions: dict, environment: dict) -> bool:
    """Goes on with a run until it is complete or time is over; returns whether it is complete.

    A run whose loss is not finite is complete, and has a `note`.
    """
    recipe = setup.recipe
    checkpoints = setup.runs / "checkpoints" / run.name
    latest = checkpoints / "progress.json"
    progress = Progress(**json.loads(latest.read_text())) if latest.exists() else Progress()
    metrics = MetricsWriter(setup.runs / f"{run.name}.jsonl", run.name, progress.step or None)
    result: dict[str, object] = {}
    while progress.step < recipe.steps and not result:
        progress, result = make_phase(run, setup, progress, metrics, checkpoints)
        if time.monotonic() > setup.deadline and progress.step < recipe.steps and not result:
            print(f"{run.name}: time is over after step {progress.step} of {recipe.steps}", flush=True)
            return False
    result |= summary_of(setup.runs / f"{run.name}.jsonl", progress, "note" not in result)
    write_summary(
        setup.runs / f"{run.name}.json",
        {"conditions": conditions, "result": result, "environment": environment},
    )
    shutil.rmtree(checkpoints, ignore_errors=True)
    return True


def make_phase(
    run: Run, setup: Setup, progress: Progress, metrics: MetricsWriter, checkpoints: Path
) -> tuple[Progress, dict[str, object]]:
    """Trains with one engine until its variant or time ends, and leaves a checkpoint.

    Returns what is known of the whole run, if this was its end or its loss is not finite.
    """
    import coat_ds

    variant, until = run.phase(progress.step, setup.recipe.steps)
    print(f"{run.name}: {variant} from step {progress.step} of {setup.recipe.steps}", flush=True)
    release()
    on_gpu = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    data = setup.task.load(setup, run.seed)
    engine = build_engine(run, variant, setup, data)
    if progress.step:
        engine.load_checkpoint(str(checkpoints))
    else:
        metrics.write(0, **validate(engine, data, setup, 0))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    result: dict[str, object] = {}
    try:
        progress = train_phase(run, engine, data, setup, progress, until, metrics)
    except ArithmeticError as error:
        result["note"] = f"{variant}: {error}"
    synchronize()
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    progress = progress._replace(peak=max(progress.peak, peak))
    if progress.step == setup.recipe.steps:
        result |= setup.task.facts(engine.module, data.train.batch(range(setup.recipe.micro_batch)))
        result["state_bytes_per_param"] = coat_ds.state_bytes(engine)["bytes_per_parameter"]
        result["parameters"] = sum(p.numel() for p in engine.module.parameters())
    elif not result:
        latest = checkpoints / "progress.json"
        # the marker goes first and comes last: a checkpoint that was cut off by a crash is none
        latest.unlink(missing_ok=True)
        engine.save_checkpoint(str(checkpoints), tag="last")
        atomic_write(latest, json.dumps(progress._asdict()).encode())
    engine.destroy()
    del engine
    release()
    return progress, result


def summary_of(lines: Path, progress: Progress, finite: bool) -> dict[str, float]:
    """Figures of a complete run, from what it wrote of its steps."""
    records = read_metrics(lines)
    first, *_, last = [record for record in records if "val_loss" in record]
    before, after = (
        {name: score for name, score in record.items() if name not in ("run", "step", "val_loss")}
        for record in (first, last)
    )
    speeds = [record["tokens_per_s"] for record in records if "tokens_per_s" in record]
    return {
        "val_loss_start": first["val_loss"],
        "val_loss": last["val_loss"] if finite else math.nan,
        **{f"{name}_start": score for name, score in before.items()},
        **{name: score if finite else math.nan for name, score in after.items()},
        "train_s": progress.seconds,
        "tokens_per_s": statistics.median(speeds) if speeds else math.nan,
        "peak_mb": progress.peak / 1e6,
    }


PRETRAINING = Task(build_gpt_of_recipe, load_text, loss_of, saved_by_layers, by_layers_at_the_end)
