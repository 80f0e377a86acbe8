"""`coat plan`: what training takes, before anything is allocated."""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping

from coat_ds.plan import advice, from_megatron, layout, unplanned
from coat_ds.plan.deepspeed_json import (
    MICRO_BATCH,
    OF_DEEPSPEED,
    OF_TRAINER,
    deepspeed_json,
    is_trainers,
    why_refused,
)
from coat_ds.plan.errors import PlanError
from coat_ds.plan.layout import Layout
from coat_ds.plan.memory import ROLES, predict
from coat_ds.plan.read import from_values, model_object, read_object
from coat_ds.plan.roofline import GPUS, Gpu, gpu_called
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System, rungs, without_fp8
from coat_ds.zero.block import asks_for_coat

UNITS = {"": 1e9, "gb": 1e9, "gib": 2**30}
AS_CONFIGURED = "as the JSON says"
EPILOG = """examples:
  coat plan config.json --gpus 2 --deepspeed ds.json
  coat plan config.json --gpus 8 --fit 80GB
  coat plan configs/model_llama2_7b.json --vocabulary 32000 --stage 2
  coat plan --gpus 8 --megatron --num-layers 32 --hidden-size 4096 ..."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("model", nargs="?", help="config.json, its folder, a model of the Hub, or a configs/model_*.json")
    add("--deepspeed", metavar="JSON", help="DeepSpeed's config: stage, buckets, offload, batches, block")
    add("--megatron", nargs=argparse.REMAINDER, help="Megatron's arguments, as the last option")
    add("--gpu", default="h100", help=f"kind of GPU, of {', '.join(GPUS)} (default: %(default)s)")
    add("--gpus", type=int, default=1, help="all of them (default: 1)")
    add("--memory", metavar="GB", help="of a GPU, for torch's allocator (default: all of it but 3 GB)")
    add("--micro-batch", type=int, help="sequences (default: the JSON's, or 1)")
    add("--sequence", type=int, help="tokens of a sequence (default: 2048, or Megatron's)")
    add("--vocabulary", type=int, help="where the model's file names none")
    add("--stage", type=int, choices=range(4), help="of ZeRO (default: the JSON's, or 2; 1 with a pipeline)")
    add("--tensor", type=int, help="tensor parallel size")
    add("--pipeline", type=int, help="pipeline parallel size")
    add("--accumulation", type=int, help="micro-batches of a step")
    add("--fit", metavar="GB", help="recommend the fastest that fits, as 80GB, and print its JSON")
    add(
        "--for",
        dest="target",
        choices=("deepspeed", "trainer"),
        help="the framework that reads this JSON, without --deepspeed",
    )
    add("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; 0. Raises PlanError, CoatConfigError or ValueError for what cannot be planned."""
    config = read_object(arguments.deepspeed) if arguments.deepspeed else None
    model, spread = _spread(arguments, config)
    gpu = gpu_called(arguments.gpu)
    limit = _bytes("--memory", arguments.memory) if arguments.memory else gpu.memory
    if arguments.fit:
        limit = _bytes("--fit", arguments.fit)
    systems = _systems(gpu)
    if config and asks_for_coat(config):
        systems.append(configured(config, spread, gpu))
    choices = advice.compare(model, spread, systems, gpu, limit)
    best, refused = None, []
    if arguments.fit:
        best, refused = _best(arguments, config, model, spread, gpu, limit)
    title = _title(model, spread, gpu)
    left_out = []
    if config:
        left_out = unplanned.of_deepspeed(config)
    elif arguments.megatron is not None:
        left_out = unplanned.of_megatron(arguments.megatron)
    base = _base(arguments, config)
    pasted = None if best is None else _pasted(best, base, arguments.megatron)
    if arguments.json:
        found = _as_json(model, spread, gpu, limit, choices, best, pasted)
        print(json.dumps(found | {"not_planned": left_out, "not_recommended": refused}, indent=2))
        return 0
    print(title)
    print()
    print(_table(choices, limit, best))
    print()
    for line in _notes(model, spread, gpu, limit, choices):
        print(line)
    for line in left_out:
        print(f"not planned: {line}.")
    for line in refused:
        print(f"not recommended: {line}")
    if best is not None:
        print()
        print(
            _recommendation(
                best,
                limit,
                spread.host == "deepspeed" and base.get(MICRO_BATCH, "auto") == "auto" and is_trainers(base),
            )
        )
        print(pasted)
    return 0


def _spread(arguments: argparse.Namespace, config: dict | None) -> tuple[Sizes, Layout]:
    given = {
        "micro_batch": arguments.micro_batch,
        "sequence": arguments.sequence,
        "stage": arguments.stage,
        "tensor": arguments.tensor,
        "pipeline": arguments.pipeline,
        "accumulation": arguments.accumulation,
    }
    rest = {name: value for name, value in given.items() if value is not None} | {"gpus": arguments.gpus}
    if arguments.megatron is not None:
        if arguments.model or config:
            raise PlanError("--megatron: it describes model and layout. Drop the model and --deepspeed.")
        model, said = from_megatron.from_arguments(arguments.megatron)
        return model, layout.from_megatron(said, **rest)
    if arguments.model is None:
        raise PlanError("model: none given. Name a config.json, or give --megatron and its arguments.")
    values = model_object(arguments.model)
    try:
        model = from_values(values, arguments.vocabulary)
    except PlanError as error:
        raise PlanError(f"{arguments.model}: {error}") from None
    if config is not None:
        return model, layout.from_deepspeed(config, model.hidden, **rest)
    return model, Layout(**{"stage": 1 if (arguments.pipeline or 1) > 1 else 2} | rest)


def configured(config: Mapping, spread: Layout, gpu: Gpu | None = None) -> System:
    """The system that a DeepSpeed JSON with a block makes of a model in this layout. On a GPU without FP8 the
    engine leaves layers in BF16."""
    from coat_ds.zero.deepspeed_config import bf16_key, block_of, no_conversion

    block, key = block_of(config), bf16_key(config)
    bf16 = {} if config.get(key) is None else layout.section(config, key)
    if not block.enabled:
        return System(name=AS_CONFIGURED)
    converted = block.activations.enabled and not no_conversion(config, block.activations)
    converted = converted and (gpu is None or gpu.fp8 > 0)
    return System(
        name=AS_CONFIGURED,
        layers="coat" if converted else "bf16",
        optimizer="coat" if block.optimizer.enabled else "adamw",
        coat=block,
        bf16_masters=bool(bf16.get("bf16_master_weights_and_grads")) and not spread.in_one_buffer,
        recompute="full" if block.fp8_activation_checkpointing else "none",
    )


def _systems(gpu: Gpu) -> list[System]:
    return list((rungs() if gpu.fp8 else without_fp8()).values())


def _base(arguments, config: dict | None) -> dict:
    """The DeepSpeed JSON to start from."""
    if config is not None:
        return config
    return OF_TRAINER if arguments.target == "trainer" else OF_DEEPSPEED


def _best(
    arguments, config, model: Sizes, spread: Layout, gpu: Gpu, limit: float
) -> tuple[advice.Choice, list[str]]:
    """The fastest choice over the ZeRO stages and micro-batches that no option fixes, and a line for each
    reason why COAT refuses others."""
    fixed = arguments.stage is not None or config is not None or spread.host == "megatron"
    stages = [spread.stage] if fixed or spread.pipeline > 1 else [1, 2, 3]
    candidates, refused, base = [], {}, _base(arguments, config)
    for stage in stages:
        layout = dataclasses.replace(spread, stage=stage)
        for system in _systems(gpu):
            if not advice.goes_with(system, layout):
                continue
            why = layout.host == "deepspeed" and why_refused(deepspeed_json(system, layout, base))
            if why:
                refused.setdefault(why, system.name)
            else:
                candidates.append((system, layout))
    lines = [f"{name}, since {why}" for why, name in refused.items()]
    if not candidates:
        raise PlanError(f"fit: nothing can be recommended: {'; '.join(lines)}")
    grow = arguments.micro_batch is None
    return advice.fastest(model, candidates, gpu, limit, grow), lines


def _title(model: Sizes, spread: Layout, gpu: Gpu) -> str:
    parallel = "".join(
        f", {name} {size}"
        for name, size in (
            ("tensor", spread.tensor),
            ("pipeline", spread.pipeline),
            ("expert", spread.expert),
        )
        if size > 1
    )
    zero = f"ZeRO-{spread.stage}" if spread.host == "deepspeed" else "Megatron"
    return (
        f"{model.parameters / 1e9:.2f}B parameters, {spread.gpus} x {gpu.name}, {zero}{parallel}, "
        f"micro-batch {spread.micro_batch} x {spread.sequence} tokens"
    )


def _table(choices: list[advice.Choice], limit: float, best: advice.Choice | None) -> str:
    """Bytes at the peak by role, in 10^9. The row of the recommended system is marked."""
    used = [role for role in ROLES if any(getattr(c.prediction.peak, role) >= 5e6 for c in choices)]
    head = ["GB", *used, "peak", "of step's", "largest", "ms", "tokens/s"]
    rows = [head]
    for choice in choices:
        peak = choice.prediction.peak
        parts = [f"{getattr(peak, role) / 1e9:.1f}" if getattr(peak, role) >= 5e6 else "" for role in used]
        over = " !" if peak.total > limit else ""
        rows.append(
            [
                f"> {choice.system.name}" if best and choice.system == best.system else choice.system.name,
                *parts,
                f"{peak.total / 1e9:.1f}{over}",
                peak.moment,
                str(choice.largest),
                f"{choice.time.total:,.0f}",
                f"{choice.tokens_per_second:,.0f}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _notes(model: Sizes, spread: Layout, gpu: Gpu, limit: float, choices: list[advice.Choice]) -> list[str]:
    lines = [
        f"peak: of the fullest GPU, at that moment of a step; ! is beyond {limit / 1e9:.1f} GB. largest: "
        "micro-batch within that, with",
        "  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. ms and tokens/s and GPU: the roofline, at best.",
        f"rates: {gpu.source}.",
    ]
    if model.beside:
        parts = ", ".join(model.beside)
        lines.append(f"not planned: {parts}: their parameters are counted, their activations are not.")
    if not model.counted:
        lines.append(
            "layers of this model type were not counted: what they save is taken for Llama's. BF16 may be"
        )
        lines.append("  off by tens of per cent of what is saved, COAT by a few.")
    if model.experts is not None:
        where = "multiply in BF16 and save 8 bits" if model.experts.grouped else "multiply in FP8"
        parallel = f"over {spread.expert_shares} GPUs" if spread.expert > 1 else "without expert parallelism"
        lines.append(
            f"experts: {model.experts.count} in a layer, {model.experts.used} for a token, {parallel}; under "
            f"COAT they {where}."
        )
        lines.append("  Tokens are taken to be spread evenly over experts. None of these peaks was measured.")
    if spared := _spared_by_stage_2(model, spread, choices):
        lines.append(
            f"zero_optimization.stage 2 takes up to {spared / 1e9:.1f} GB less than 1 where nothing divides "
            "gradients, and sends no more."
        )
    piece = max(choice.prediction.in_one_piece for choice in choices)
    if piece > 0.01 * limit:
        lines.append(
            f"stage 1 makes up to {piece / 1e9:.1f} GB of gradients in one piece in each step. Without room "
            "for them torch's"
        )
        lines.append("  allocator gives memory back each time: slower by a third. --fit leaves the room.")
    if (held := _held_by_graphs(model, spread, choices)) is not None:
        lines.append(
            "cuda_graphs null launches these layers, for which the GPU may wait. true records them, for up "
            f"to {held / 1e9:.1f} GB more."
        )
    if on_host := max(choice.prediction.host for choice in choices):
        lines.append(f"offload: up to {on_host / 1e9:.1f} GB of the CPU's memory for each GPU.")
    if any(choice.system.recompute == "full" for choice in choices):
        lines.append("recompute: with gradient checkpointing of whole layers switched on in the script.")
    return lines


def _spared_by_stage_2(model: Sizes, spread: Layout, choices: list[advice.Choice]) -> float:
    """Bytes that stage 2 saves, the largest of all systems, if more than 3 per cent. 0 unless stage 1 is
    planned and each GPU steps all of its weights."""
    if (spread.host, spread.stage, spread.data, spread.pipeline) != ("deepspeed", 1, 1, 1):
        return 0
    second = dataclasses.replace(spread, stage=2)
    spared = 0.0
    for choice in choices:
        peak = choice.prediction.peak.total
        less = peak - predict(model, second, choice.system).peak.total
        spared = max(spared, less if less > 0.03 * peak else 0)
    return spared


def _held_by_graphs(model: Sizes, spread: Layout, choices: list[advice.Choice]) -> float | None:
    """Bytes of the peak that graphs would add, of the system where it is most; None where there is no such
    choice to make."""
    added = (
        predict(model, spread, choice.system.with_graphs(True)).peak.total - choice.prediction.peak.total
        for choice in choices
        if choice.prediction.may_wait
    )
    return max(added, default=None)


def _recommendation(best: advice.Choice, limit: float, trainer: bool) -> str:
    total, layout = best.prediction.peak.total, best.layout
    stage = f", ZeRO-{layout.stage}" if layout.host == "deepspeed" else ""
    line = (
        f"fastest within {limit / 1e9:.1f} GB (>): {best.system.name}{stage}, micro-batch "
        f"{layout.micro_batch}, {total / 1e9:.1f} GB, at best {best.tokens_per_second:,.0f} tokens/s and GPU"
    )
    if trainer:
        arguments = f"per_device_train_batch_size={layout.micro_batch}"
        line += (
            f"\nTrainingArguments: bf16=True, {arguments}, gradient_accumulation_steps={layout.accumulation}"
        )
        if best.system.recompute == "full":
            line += ", gradient_checkpointing=True"
    return line


def _pasted(best: advice.Choice, base: dict, megatron: list[str] | None) -> str:
    if best.layout.host == "deepspeed":
        return json.dumps(deepspeed_json(best.system, best.layout, base), indent=2)
    words = f"--micro-batch-size {best.layout.micro_batch}"
    if best.system.recompute == "full":
        words += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    block = best.system.block().get("coat")
    if block is None:
        return words
    words += " --spec megatron_ext.spec coat_layer_spec"
    if removed := unplanned.refused_by_spec(megatron):
        words = f"without {', '.join(removed)}, which the spec refuses\n{words}"
    return f"{words}\nand in the file that COAT_CONFIG names\n{json.dumps({'coat': block}, indent=2)}"


def _as_json(model, spread, gpu, limit, choices, best, pasted) -> dict:
    def of(choice: advice.Choice) -> dict:
        return {
            "system": choice.system.name,
            "stage": choice.layout.stage,
            "micro_batch": choice.layout.micro_batch,
            "peak_bytes": round(choice.prediction.peak.total),
            "peak_moment": choice.prediction.peak.moment,
            "roles": {role: round(getattr(choice.prediction.peak, role)) for role in ROLES},
            "moments": {memory.moment: round(memory.total) for memory in choice.prediction.moments},
            "host_bytes": round(choice.prediction.host),
            "largest_micro_batch": choice.largest,
            "milliseconds": dataclasses.asdict(choice.time) | {"total": choice.time.total},
            "tokens_per_second_and_gpu": choice.tokens_per_second,
        }

    found = {
        "model": dataclasses.asdict(model) | {"parameters": model.parameters},
        "layout": dataclasses.asdict(spread) | {"limits": spread.limits._asdict()},
        "gpu": dataclasses.asdict(gpu),
        "limit_bytes": limit,
        "systems": [of(choice) for choice in choices],
    }
    if best is not None:
        found["recommended"] = of(best) | {"paste": pasted}
    return found


def _bytes(option: str, text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise PlanError(f"{option}: expected a size such as 80GB or 79.6GiB, found {text!r}. Correct it.")
    return float(match[1]) * UNITS[match[2]]
