"""The command `coat`: plan, doctor, watch, patches, train."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence

PACKAGE = "coat-train"
# the training entry point as a module
TRAINING = "coat_launch.pretrain_gpt"


def version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (run from a checkout)"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="coat", description="FP8 GEMMs, 8-bit activations and AdamW states.")
    made.add_argument("--version", action="version", version=f"coat {version()}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND")
    plan = commands.add_parser("plan", help="memory, time and what fits, before anything is allocated")
    doctor = commands.add_parser("doctor", help="whether this machine and these packages are fit for it")
    watch = commands.add_parser("watch", help="readings of a run, as a table and pictures")
    commands.add_parser("patches", help="what is patched of the installed frameworks, and why")
    # the training script parses its own options, --help included
    commands.add_parser("train", help="train a GPT: hands its arguments on", add_help=False)
    from coat_ds.doctor.command import add_options as doctor_options
    from coat_ds.plan.command import add_options as plan_options
    from coat_ds.watch.command import add_options as watch_options

    plan_options(plan)
    doctor_options(doctor)
    watch_options(watch)
    return made


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0 for success, 1 for problems found, 2 for wrong arguments."""
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] == ["train"]:
        return _train(words[1:])
    arguments = parser().parse_args(words)
    if arguments.command is None:
        parser().print_help(sys.stderr)
        return 2
    if arguments.command == "patches":
        from coat_ds import patches

        print(patches.text(patches.table()))
        return 0
    try:
        code = importlib.import_module(f"coat_ds.{arguments.command}.command").run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # `| head` has closed the pipe; Python's flush at exit must not raise a second time
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    # PlanError and CoatConfigError are subclasses; a plain ValueError is a defect and keeps its traceback
    except ValueError as error:
        if type(error) is ValueError:
            raise
        print(f"coat {arguments.command}: {error}", file=sys.stderr)
        return 2


def _train(words: list[str]) -> int:
    # the program name in argparse's messages
    sys.argv[0] = "coat train"
    importlib.import_module(TRAINING).main(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
