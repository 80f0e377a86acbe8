"""Lines about layers, each said once: a forward pass may bring them up again and again. Where a model is
converted, such as a second one in a notebook, they are said anew."""

import functools
import logging

import torch

_logger = logging.getLogger(__name__)


# compiled code then says it when it is compiled, and goes on
@torch.compiler.assume_constant_result
def say_once(line: str, level: int = logging.WARNING) -> None:
    """Logs `line` on rank 0, unless it was said since the last `say_anew`."""
    _say(line, level)


def say_anew() -> None:
    """For a model that is converted now, of which nothing was said."""
    _say.cache_clear()


@functools.cache
def _say(line: str, level: int) -> None:
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        _logger.log(level, "COAT: %s", line)
