"""COAT's log: the logger "coat_ds", one prefix, rank 0 only.

A program that has not configured logging sees the lines on stderr. To hide INFO lines, call
`logging.getLogger("coat_ds").setLevel(logging.WARNING)`.
"""

import functools
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping

import torch

# names of modules that a line lists for a reason
NAMED = 3

logger = logging.getLogger("coat_ds")


class _Unconfigured(logging.Handler):
    """Shows lines where the root logger has no handler, which would only show warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr, flush=True)


if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
logger.addHandler(_Unconfigured())


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def log_rank_0(line: str, level: int = logging.INFO) -> None:
    """Logs `line` on rank 0."""
    if is_first_rank():
        log_here(line, level)


def warn_rank_0(line: str) -> None:
    """Logs `line` as a warning on rank 0."""
    log_rank_0(line, logging.WARNING)


def by_reason(reasons: Mapping[str, str]) -> Iterator[tuple[int, str, str]]:
    """For each reason how many modules have it, the names of the first ones, and the reason.

    reasons: by name of a module; "" is the whole model.
    """
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name or "the model")
    for why, found in names.items():
        yield len(found), ", ".join(found[:NAMED]) + (", ..." if len(found) > NAMED else ""), why


def listed(title: str, lines: Iterable[str]) -> str:
    """`title`, with each of `lines` indented on a line of its own."""
    return "\n    ".join([title, *lines])


def log_here(line: str, level: int = logging.WARNING, error: BaseException | None = None) -> None:
    """Logs `line` on this rank, for what concerns one rank; with the traceback of `error`."""
    logger.log(level, "COAT: %s", line, exc_info=error)


# under torch.compile the line is logged when the code is compiled, without a graph break
@torch.compiler.assume_constant_result
def log_once(line: str, level: int = logging.WARNING) -> None:
    """Logs `line` on rank 0, unless it was logged since the last `forget_logged`."""
    _log_once(line, level)


def forget_logged() -> None:
    """Lets `log_once` log every line again, for a model that is converted now."""
    _log_once.cache_clear()


_log_once = functools.cache(log_rank_0)
