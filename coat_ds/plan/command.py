"""`coat plan`: what training takes, before anything is allocated."""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping

from coat_ds.config import read_object
from coat_ds.plan import advice, report
from coat_ds.plan.deepspeed_json import OF_DEEPSPEED, OF_TRAINER, deepspeed_json, why_refused
from coat_ds.plan.deepspeed_layout import from_deepspeed
from coat_ds.plan.errors import PlanError
from coat_ds.plan.gpus import GPUS, Gpu, find_gpu
from coat_ds.plan.layout import Layout
from coat_ds.plan.read import as_megatrons, from_values, model_object
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System, all_systems, without_fp8
from coat_ds.zero.block import asks_for_coat, section

UNITS = {"": 1e9, "gb": 1e9, "gib": 2**30}
AS_CONFIGURED = "as the JSON says"
EPILOG = """examples:
  coat plan config.json --gpus 2 --deepspeed ds.json
  coat plan config.json --gpus 8 --fit 80GB
  coat plan configs/model_llama2_7b.json --vocabulary 32000 --stage 2
  coat plan config.json --megatron --gpus 8 --tensor 2 --fit 80GB"""
# options that are fields of Layout
LAYOUT = ("gpus", "micro_batch", "sequence", "stage", "tensor", "pipeline", "expert", "accumulation")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("model", nargs="?", help="config.json, its folder, a model of the Hub, or a configs/model_*.json")
    add("--deepspeed", metavar="JSON", help="DeepSpeed's config: stage, buckets, offload, batches, block")
    add("--megatron", action="store_true", help="training is Megatron's, with its distributed optimizer")
    add("--gpu", default="h100", help=f"kind of GPU, of {', '.join(GPUS)} (default: %(default)s)")
    add("--gpus", type=int, default=1, help="number of all GPUs (default: 1)")
    add("--micro-batch", type=int, help="sequences (default: the JSON's, or 1)")
    add("--sequence", type=int, help="tokens of a sequence (default: 2048)")
    add("--vocabulary", type=int, help="size of the vocabulary, where the model's file names none")
    add("--stage", type=int, choices=range(1, 4), help="ZeRO stage (default: the JSON's, or 2)")
    add("--tensor", type=int, help="tensor parallel size, with sequence parallelism")
    add("--pipeline", type=int, help="pipeline parallel size of Megatron")
    add("--expert", type=int, help="expert parallel size of Megatron")
    add("--accumulation", type=int, help="micro-batches of a step")
    add("--fit", metavar="GB", help="recommend the fastest that fits, as 80GB, and print its JSON")
    frameworks = ("deepspeed", "trainer")
    add("--for", dest="target", choices=frameworks, help="what reads this JSON, without --deepspeed")
    add("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; 0. Raises PlanError, CoatConfigError or ValueError for what cannot be planned."""
    config = read_object(arguments.deepspeed) if arguments.deepspeed else None
    model, layout = _model_and_layout(arguments, config)
    gpu = find_gpu(arguments.gpu)
    limit = _bytes(arguments.fit) if arguments.fit else gpu.memory
    systems = list((all_systems() if gpu.fp8 else without_fp8()).values())
    base = OF_TRAINER if arguments.target == "trainer" else OF_DEEPSPEED
    base = base if config is None else config
    if config is not None or arguments.target == "trainer":
        # they are for DeepSpeed
        systems = [system for system in systems if not system.release]
    best, refused = None, []
    if arguments.fit:
        fixed = arguments.stage is not None or config is not None or layout.framework == "megatron"
        layouts = [dataclasses.replace(layout, stage=n) for n in (1, 2, 3)] if not fixed else [layout]
        candidates, refused = _candidates(systems, layouts, base)
        best = advice.fastest(model, candidates, gpu, limit, grow=arguments.micro_batch is None)
    if config and asks_for_coat(config):
        systems.append(configured(config, gpu))
        if why := why_refused(config):
            refused.append(f"{systems[-1].name}, since {why}")
    choices = {
        choice.system.name: (choice, advice.largest_micro_batch(model, layout, choice.system, limit))
        for choice in advice.compare(model, layout, systems, gpu)
    }
    plan = report.Plan(model, layout, gpu, limit, choices, best, refused, base)
    if arguments.json:
        print(json.dumps(report.as_json(plan), indent=2))
    else:
        print(report.as_text(plan))
    return 0


def _model_and_layout(arguments: argparse.Namespace, config: dict | None) -> tuple[Sizes, Layout]:
    given = {name: found for name in LAYOUT if (found := getattr(arguments, name)) is not None}
    if arguments.model is None:
        raise PlanError("model: none given. Name a config.json, its folder, or a model of the Hub.")
    values = model_object(arguments.model)
    try:
        model = from_values(values, arguments.vocabulary)
    except PlanError as error:
        raise PlanError(f"{arguments.model}: {error}") from None
    if arguments.megatron:
        if config is not None:
            raise PlanError("--megatron: it reads no DeepSpeed JSON. Drop --deepspeed.")
        layout = Layout(framework="megatron", fp32_gradients=True, **given)
        return as_megatrons(model, layout), layout
    if config is not None:
        return model, from_deepspeed(config, model, **given)
    return model, Layout(**{"stage": 2} | given)


def configured(config: Mapping, gpu: Gpu | None = None) -> System:
    """The system that a DeepSpeed JSON with a block makes of a model. On a GPU without FP8 the engine leaves
    layers in BF16."""
    from coat_ds.zero.deepspeed_config import bf16_key, block_of, is_16_bit, why_no_conversion

    block, key = block_of(config), bf16_key(config)
    bf16 = section(config, key)
    # FP32 is not planned
    name = AS_CONFIGURED if is_16_bit(config) else f"{AS_CONFIGURED}, if in BF16"
    if not block.enabled:
        return System(name=name)
    converted = block.activations.enabled and not why_no_conversion(config)
    converted = converted and (gpu is None or gpu.fp8 > 0)
    return System(
        name=name,
        layers="coat" if converted else "bf16",
        optimizer="coat" if block.optimizer.enabled else "adamw",
        coat=block,
        bf16_masters=bool(bf16.get("bf16_master_weights_and_grads")),
        recompute="full" if block.fp8_activation_checkpointing else "none",
    )


def _candidates(
    systems: list[System], layouts: list[Layout], base: Mapping
) -> tuple[list[tuple[System, Layout]], list[str]]:
    """What may be recommended, and a line for each reason why COAT refuses others."""
    candidates, refused = [], {}
    for layout in layouts:
        for system in systems:
            if not advice.goes_with(system, layout):
                continue
            in_deepspeed = layout.framework == "deepspeed" and not system.release
            why = in_deepspeed and why_refused(deepspeed_json(system, layout, base))
            if why:
                refused.setdefault(why, system.name)
            else:
                candidates.append((system, layout))
    lines = [f"{name}, since {why}" for why, name in refused.items()]
    if not candidates:
        raise PlanError(f"fit: nothing can be recommended: {'; '.join(lines)}")
    return candidates, lines


def _bytes(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise PlanError(f"--fit: expected a size such as 80GB or 79.6GiB, found {text!r}. Correct it.")
    return float(match[1]) * UNITS[match[2]]
