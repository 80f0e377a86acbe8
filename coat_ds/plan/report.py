"""What `coat plan` prints: a table of systems, notes, and what `--fit` recommends."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from coat_ds.plan.advice import Choice
from coat_ds.plan.deepspeed_json import MICRO_BATCH, deepspeed_json, is_trainers
from coat_ds.plan.gpus import Gpu
from coat_ds.plan.layout import Layout
from coat_ds.plan.memory import ROLES
from coat_ds.plan.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Plan:
    """The systems that were compared for a model on GPUs."""

    model: Sizes
    layout: Layout
    gpu: Gpu
    limit: float
    """Bytes that a peak may take."""
    choices: dict[str, tuple[Choice, int]]
    """By the system's name, with the largest micro-batch."""
    best: Choice | None
    """The recommended system."""
    refused: list[str]
    """Reasons why other systems are not recommended."""
    base: Mapping
    """The DeepSpeed JSON that the recommendation changes."""


def as_text(plan: Plan) -> str:
    parts = [_title(plan), "", _table(plan), "", *_notes(plan)]
    parts += [f"not recommended: {line}" for line in plan.refused]
    if plan.best is not None:
        parts += [
            "",
            _recommendation(plan.best, plan),
            _paste(plan.best, plan.base, plan.model.experts is not None),
        ]
    return "\n".join(parts)


def as_json(plan: Plan) -> dict:
    """The plan as values that JSON can hold."""
    found = {
        "model": dataclasses.asdict(plan.model) | {"parameters": plan.model.parameters},
        "limit_bytes": plan.limit,
        "systems": [
            _plain(choice) | {"largest_micro_batch": largest} for choice, largest in plan.choices.values()
        ],
        "not_recommended": plan.refused,
    }
    if plan.best is not None:
        found["recommended"] = _plain(plan.best) | {
            "paste": _paste(plan.best, plan.base, plan.model.experts is not None)
        }
    return found


def _plain(choice: Choice) -> dict:
    peak = choice.prediction.peak
    return {
        "system": choice.system.name,
        "stage": choice.layout.stage,
        "micro_batch": choice.layout.micro_batch,
        "peak_bytes": round(peak.total),
        "peak_moment": peak.moment,
        "roles": {role: round(getattr(peak, role)) for role in ROLES},
        "moments": {memory.moment: round(memory.total) for memory in choice.prediction.moments},
        "host_bytes": round(choice.prediction.on_host),
        "milliseconds": dataclasses.asdict(choice.time) | {"total": choice.time.total},
        "tokens_per_second_and_gpu": choice.tokens_per_second,
    }


def _title(plan: Plan) -> str:
    layout = plan.layout
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "expert": layout.expert}
    parallel = "".join(f", {name} {size}" for name, size in sizes.items() if size > 1)
    zero = f"ZeRO-{layout.stage}" if layout.framework == "deepspeed" else "Megatron"
    return (
        f"{plan.model.parameters / 1e9:.2f}B parameters, {layout.gpus} x {plan.gpu.name}, {zero}{parallel}, "
        f"micro-batch {layout.micro_batch} x {layout.sequence} tokens"
    )


def _table(plan: Plan) -> str:
    """GB at the peak by role. The row of the recommended system is marked."""
    rows = []
    for name, (choice, largest) in plan.choices.items():
        peak = choice.prediction.peak
        in_gb = {role: f"{getattr(peak, role) / 1e9:.1f}" for role in ROLES}
        row = {"GB": f"> {name}" if plan.best and name == plan.best.system.name else name}
        row |= {role: "" if text == "0.0" else text for role, text in in_gb.items()}
        row["peak"] = f"{peak.total / 1e9:.1f}{' !' if peak.total > plan.limit else ''}"
        row |= {"of step's": peak.moment, "largest": str(largest), "ms": f"{choice.time.total:,.0f}"}
        rows.append(row | {"tokens/s": f"{choice.tokens_per_second:,.0f}"})
    used = [head for head in rows[0] if any(row[head] for row in rows)]
    widths = {head: max(len(head), *(len(row[head]) for row in rows)) for head in used}
    lines = []
    for row in (dict(zip(used, used, strict=True)), *rows):
        first, *cells = (row[head].rjust(width) for head, width in widths.items())
        lines.append("  ".join([first.strip().ljust(widths["GB"]), *cells]).rstrip())
    return "\n".join(lines)


def _notes(plan: Plan) -> list[str]:
    model, choices = plan.model, [choice for choice, _ in plan.choices.values()]
    lines = [
        f"peak: of the fullest GPU, at that moment of a step; ! is beyond {plan.limit / 1e9:.1f} GB. "
        "largest: micro-batch within that, with",
        "  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. ms and tokens/s and GPU: the roofline, at best.",
        f"rates: {plan.gpu.source}.",
    ]
    if model.outside:
        lines.append(
            f"not planned: {model.outside:,} parameters outside of the decoder. They are counted, what they "
            "compute is not."
        )
    if not model.counted:
        lines += [
            "layers of this model type were not counted: what they save is taken for Llama's. BF16 may be",
            "  off by tens of per cent of what is saved, COAT by a few.",
        ]
    if experts := model.experts:
        lines += [
            f"experts: {experts.count} in a layer, {experts.used} for a token; under COAT they multiply in "
            "FP8.",
            "  Tokens are taken to be spread evenly over experts. None of these peaks was measured.",
        ]
    if on_host := max(choice.prediction.on_host for choice in choices):
        lines.append(f"offload: up to {on_host / 1e9:.1f} GB of the CPU's memory for each GPU.")
    if any(choice.system.recompute == "full" for choice in choices):
        lines.append("recompute: with gradient checkpointing of whole layers switched on in the script.")
    return lines


def _recommendation(best: Choice, plan: Plan) -> str:
    layout, in_deepspeed = best.layout, best.layout.framework == "deepspeed" and not best.system.release
    stage = f", ZeRO-{layout.stage}" if in_deepspeed else ""
    line = (
        f"fastest within {plan.limit / 1e9:.1f} GB (>): {best.system.name}{stage}, micro-batch "
        f"{layout.micro_batch}, {best.bytes / 1e9:.1f} GB, at best {best.tokens_per_second:,.0f} tokens/s "
        "and GPU"
    )
    if on_host := best.prediction.on_host:
        line += (
            f"\nhost memory: {on_host / 1e9:.1f} GB. Of a step, {best.time.optimizer / 1e3:.2f} s are the "
            "optimizer's, copies included, which backward does not hide"
        )
    if in_deepspeed and is_trainers(plan.base) and plan.base.get(MICRO_BATCH, "auto") == "auto":
        arguments = f"per_device_train_batch_size={layout.micro_batch}"
        arguments += f", gradient_accumulation_steps={layout.accumulation}"
        if best.system.recompute == "full":
            arguments += ", gradient_checkpointing=True"
        line += f"\nTrainingArguments: bf16=True, {arguments}"
    return line


def _paste(best: Choice, base: Mapping, grouped: bool) -> str:
    """The DeepSpeed JSON, lines of Python, or Megatron's arguments and the file of COAT_CONFIG."""
    if best.system.release:
        return (
            f"coat_ds.convert(model, {best.system.keys['activations']})\n"
            "optimizer = coat_ds.CoatAdamW(model.named_parameters(), lr=2e-5, betas=(0.9, 0.95), "
            f"offload={best.system.coat.optimizer.offload!r})\n"
            "optimizer.release_gradients()"
        )
    if best.layout.framework == "deepspeed":
        return json.dumps(deepspeed_json(best.system, best.layout, base), indent=2)
    words = f"--micro-batch-size {best.layout.micro_batch}"
    if best.system.recompute == "full":
        words += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    block = best.system.block().get("coat")
    if block is None:
        return words
    if grouped:
        words += " --moe-grouped-gemm"
    block = json.dumps({"coat": block}, indent=2)
    return (
        f"{words} --spec megatron_ext.spec coat_layer_spec\nand in the file that COAT_CONFIG names\n{block}"
    )
