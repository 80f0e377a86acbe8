"""`coat doctor`: one page on whether this machine and its packages are ready."""

import argparse
import json
import random
from collections import Counter

from coat_ds.doctor import deepspeed_json, dry_run, machine, packages, switches
from coat_ds.doctor.finding import PROBLEM, UNKNOWN, Finding
from coat_ds.plan import meta_model
from coat_ds.plan.errors import PlanError
from coat_ds.plan.read import from_values, model_object

EPILOG = """exit code: 0 without problems, also if checks were left out; 1 with problems; 2 for wrong options
example:
  coat doctor --deepspeed ds.json --model config.json --folder runs"""
MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM", "unknown": "-"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--deepspeed", metavar="FILE", help="DeepSpeed's JSON, or Accelerate's YAML that names it")
    add("--model", help="config.json, its folder, a model of the Hub, or a file of configs/model_*.json")
    add("--vocabulary", type=int, help="size of the vocabulary, if the model's file has none")
    add("--gpus", type=int, default=1, help="number of all GPUs, for the predicted peak (default: 1)")
    add("--sequence", type=int, default=2048, help="tokens of a sequence, for the peak (default: 2048)")
    add(
        "--kernels",
        nargs="?",
        type=int,
        const=random.randrange(10**6),
        metavar="SEED",
        help="check every kernel of this project on this GPU as well, with random sizes: a minute",
    )
    add("--folder", help="folder of checkpoints, to check its free space (default: the current one)")
    add("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if one is a problem. Raises PlanError for files that cannot be read."""
    config, found = deepspeed_json.read(arguments.deepspeed) if arguments.deepspeed else (None, [])
    parts = {"packages": packages.check(), "switch": [switches.check()]}
    values = model_object(arguments.model) if arguments.model else None
    if config is not None and values is None:
        raise PlanError("--deepspeed: a model is needed with it. Give --model and its config.json.")
    model, parameters = None, None
    if values is not None:
        model, parameters = _described(values, config is not None, arguments)
    parts["machine"] = machine.check(arguments.folder, parameters)
    if isinstance(model, Finding):
        found.append(model)
        model = None
    elif config is not None and model is None:
        text = (
            "needs a config.json of Hugging Face's, with model_type; Megatron's models log it when they start"
        )
        found.append(Finding("model", UNKNOWN, text))
    if config is not None:
        found.append(deepspeed_json.check(config, arguments.gpus))
        found += dry_run.check(config, model, arguments.gpus, arguments.sequence)
    if found:
        parts["model"] = found
    if arguments.kernels is not None:
        # it imports all kernels
        from coat_ds.doctor import kernels

        parts["kernels"] = kernels.check(arguments.kernels)
    problems = sum(f.state == PROBLEM for findings in parts.values() for f in findings)
    if arguments.json:
        plain = {name: [f._asdict() for f in findings] for name, findings in parts.items()}
        print(json.dumps({"healthy": not problems, "problems": problems, **plain}, indent=2))
    else:
        print(_page(parts))
    return 1 if problems else 0


def _described(values: dict, needs_model: bool, arguments) -> tuple:
    """The model of a config.json, None if it is not needed or is Megatron's, or a finding if it cannot be
    built; and the number of its parameters, None if unknown."""
    if not needs_model or "model_type" not in values:
        try:
            return None, from_values(values, arguments.vocabulary).parameters
        # a model that cannot be planned may still be built, and its parameters counted
        except PlanError:
            if "model_type" not in values:
                raise
    try:
        built = meta_model.build(values)
    except PlanError as error:
        if "auto_map" not in values:
            return Finding("model", PROBLEM, str(error)), None
        text = (
            "needs code of its own (auto_map), which is not run here: layers, states and peak are not "
            "checked. The engine's log lists the layers when training starts"
        )
        return Finding("model", UNKNOWN, text), None
    return built, sum(p.numel() for p in built.parameters())


def _page(parts: dict[str, list[Finding]]) -> str:
    findings = [finding for part in parts.values() for finding in part]
    width = max(len(finding.check) for finding in findings)
    mark = max(len(text) for text in MARKS.values())
    lines = []
    for name, part in parts.items():
        lines.append(name)
        lines += [f"  {MARKS[f.state]:{mark}}  {f.check:{width}}  {f.text}" for f in part]
    counts = Counter(finding.state for finding in findings)
    lines.append("")
    verdict = "healthy" if not counts["problem"] else "not healthy"
    found = ", ".join(f"{counts[name]} {name}{'s' * (counts[name] != 1)}" for name in ("warning", "problem"))
    lines.append(f"{verdict}: {counts['ok']} ok, {found}, {counts['unknown']} not checked (-)")
    return "\n".join(lines)
