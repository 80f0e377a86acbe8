"""Log lines about layers, each logged once, since each forward pass would repeat them. Converting a model,
such as a second one in a notebook, makes them be logged again."""

import functools
import logging

import torch

_logger = logging.getLogger(__name__)


# under torch.compile the line is logged when the code is compiled, without a graph break
@torch.compiler.assume_constant_result
def say_once(line: str, level: int = logging.WARNING) -> None:
    """Logs `line` on rank 0, unless it was logged since the last `say_anew`."""
    _say(line, level)


def say_anew() -> None:
    """Lets `say_once` log every line again, for a model that is converted now."""
    _say.cache_clear()


@functools.cache
def _say(line: str, level: int) -> None:
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        _logger.log(level, "COAT: %s", line)
