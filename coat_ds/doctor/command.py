"""`coat doctor`: one page on whether this machine and its packages are ready."""

import argparse
import json
from collections import Counter

from coat_ds.config import read_object
from coat_ds.doctor import PROBLEM, UNKNOWN, Finding, dry_run, machine, packages, switches
from coat_ds.plan.errors import PlanError
from coat_ds.plan.read import meta_model, model_object

EPILOG = """exit code: 0 without problems, also if checks were left out; 1 with problems; 2 for wrong options
example:
  coat doctor --deepspeed ds.json --model config.json"""
MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM", "unknown": "-"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--deepspeed", metavar="JSON", help="DeepSpeed's config: what it would do to the model")
    add("--model", help="config.json, its folder, or a model of the Hub")
    add("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if one is a problem. Raises PlanError or CoatConfigError for files that
    cannot be read."""
    if bool(arguments.deepspeed) != bool(arguments.model):
        raise PlanError("--deepspeed, --model: one is checked with the other. Give both, a JSON and a model.")
    parts = {"packages": packages.check(), "switch": [switches.check()], "machine": machine.check()}
    if arguments.deepspeed:
        parts["model"] = _of_model(arguments)
    problems = sum(f.state == PROBLEM for findings in parts.values() for f in findings)
    if arguments.json:
        plain = {name: [f._asdict() for f in findings] for name, findings in parts.items()}
        print(json.dumps({"healthy": not problems, "problems": problems, **plain}, indent=2))
    else:
        print(_page(parts))
    return 1 if problems else 0


def _of_model(arguments: argparse.Namespace) -> list[Finding]:
    """What the JSON does to the model. What cannot be built has a finding, and the JSON is checked alone."""
    config, values = read_object(arguments.deepspeed), model_object(arguments.model)
    model, found = None, []
    try:
        model = meta_model(values)
    except PlanError as error:
        # a model with its own code is built when training starts, and the engine's log lists its layers
        found.append(Finding("model", UNKNOWN if "auto_map" in values else PROBLEM, str(error)))
    return found + dry_run.check(config, model)


def _page(parts: dict[str, list[Finding]]) -> str:
    findings = [finding for part in parts.values() for finding in part]
    width = max(len(finding.check) for finding in findings)
    mark = max(len(text) for text in MARKS.values())
    lines = []
    for name, part in parts.items():
        lines.append(name)
        lines += [f"  {MARKS[f.state]:{mark}}  {f.check:{width}}  {f.text}" for f in part]
    counts = Counter(finding.state for finding in findings)
    verdict = "healthy" if not counts["problem"] else "not healthy"
    found = ", ".join(f"{counts[name]} {name}{'s' * (counts[name] != 1)}" for name in ("warning", "problem"))
    return "\n".join(
        [*lines, "", f"{verdict}: {counts['ok']} ok, {found}, {counts['unknown']} not checked (-)"]
    )
