"""How an unmodified script comes to honour the `"coat"` block.

Every DeepSpeed engine, the pipeline's and the hybrid one too, is built by `DeepSpeedEngine.__init__`.
`install` exchanges that one method, so that it works wherever and whenever a script got
`deepspeed.initialize` from. The new method looks for the block; without one it calls the original and
nothing else.

`pip install` makes `coat_autoload` an entry point of `torch.backends`, a group that torch loads at the end of
its own import, and that calls `register`. It puts a finder in front of `sys.meta_path`, which waits for
`deepspeed.runtime.engine` and goes away. So a Python that does not import torch runs none of this, and one
that does imports this file, which needs nothing but the standard library: 0.3 ms for the import and less
than 1 ms in all, measured on a server's core, of torch's own 1.2 s. The rest of `coat_ds` is imported when an
engine with a block is built.

`COAT_DISABLE=1` in the environment keeps `register` from doing anything but saying that a block is ignored,
`TORCH_DEVICE_BACKEND_AUTOLOAD=0`, torch's own switch, from being called; `install` and `coat_ds.initialize`
ignore both.
"""

import contextlib
import functools
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

HOST = "deepspeed.runtime.engine"
DISABLE = "COAT_DISABLE"
OPTIMIZER_TYPE = "CoatAdamW"
# arguments of DeepSpeedEngine.__init__ that are relied on
ARGUMENTS = ("model", "optimizer", "config_class")

_log = logging.getLogger("coat_ds")


def install() -> None:
    """Has every DeepSpeed engine that is built from now on honour the `"coat"` block. May be called again.

    If DeepSpeed is not imported yet, this happens when it is.
    Raises RuntimeError if the installed DeepSpeed is not one that this was written for.
    """
    host = sys.modules.get(HOST)
    if host is None:
        _wait(_exchange)
    elif not is_installed():
        check_host(host)
        _exchange(host)


def uninstall() -> None:
    """Undoes `install`; engines that exist stay as they are. Does nothing if it is not installed.

    Raises RuntimeError if somebody else has exchanged the same method since.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    if not is_installed():
        return
    cls = sys.modules[HOST].DeepSpeedEngine
    if not _is_ours(cls.__init__):
        raise RuntimeError(
            f"uninstall: {HOST}.DeepSpeedEngine.__init__ was exchanged again after coat_ds.install(). Undo "
            "that first."
        )
    cls.__init__ = cls.__init__.__wrapped__


def is_installed() -> bool:
    """Whether the engines of the imported DeepSpeed honour the block."""
    method = getattr(getattr(sys.modules.get(HOST), "DeepSpeedEngine", None), "__init__", None)
    while method is not None and not _is_ours(method):
        method = getattr(method, "__wrapped__", None)
    return method is not None


def _is_ours(method: Any) -> bool:
    return getattr(method, "coat_method", None) is method


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` for a while, unless it is already."""
    if is_installed():
        yield
        return
    install()
    try:
        yield
    finally:
        uninstall()


def register() -> None:
    """What `coat_autoload` calls at the end of torch's import."""
    host = sys.modules.get(HOST)
    if os.environ.get(DISABLE) != "1":
        _wait(_exchange) if host is None else _exchange(host)
    elif host is not None:
        _say_disabled(host)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        _wait(_say_disabled)


def check_host(host: ModuleType) -> None:
    """Raises RuntimeError unless `DeepSpeedEngine.__init__` takes the arguments that are relied on."""
    found = inspect.signature(host.DeepSpeedEngine.__init__).parameters
    missing = [name for name in ARGUMENTS if name not in found]
    if missing:
        from deepspeed import __version__

        from coat_ds.versions import DEEPSPEED

        raise RuntimeError(
            f"coat_ds: DeepSpeedEngine.__init__ of DeepSpeed {__version__} has no argument "
            f"{', '.join(missing)}. Install deepspeed{DEEPSPEED}, or drop the coat block."
        )


def asks_for_coat(host_config: Any) -> bool:
    """Whether a DeepSpeed config has a `"coat"` block, wherever it is, or names our optimizer."""
    if not isinstance(host_config, Mapping):
        return False
    section = host_config.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    named = str(kind).lower() == OPTIMIZER_TYPE.lower()
    return "coat" in host_config or named or misplaced_block(host_config) is not None


def misplaced_block(host_config: Mapping[str, Any], within: str = "") -> str | None:
    """The path of a block under another spelling, as "COAT", or inside of a section; None without.

    within: the path of `host_config` itself, with a dot behind it; empty for the whole config.
    """
    for key, value in host_config.items():
        named = str(key).lower() == "coat"
        if named and (within or key != "coat"):
            return f"{within}{key}"
        # what stands in the block itself is its own reader's to judge
        found = (
            misplaced_block(value, f"{within}{key}.") if isinstance(value, Mapping) and not named else None
        )
        if found is not None:
            return found
    return None


def _exchange(host: ModuleType) -> None:
    original = host.DeepSpeedEngine.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        host_config = getattr(bound.arguments.get("config_class"), "_param_dict", None)
        if not asks_for_coat(host_config):
            return original(self, *args, **kwargs)
        check_host(host)
        from coat_ds import engine

        prepared = engine.prepare(bound.arguments)
        with prepared.units.building():
            original(*bound.args, **bound.kwargs)
        engine.finish(self, prepared)

    # itself, since whoever wraps this method may copy its attributes
    __init__.coat_method = __init__
    host.DeepSpeedEngine.__init__ = __init__
    _log.info("%s.DeepSpeedEngine honours the coat block now; coat_ds.uninstall() undoes it", HOST)


def _say_disabled(host: ModuleType) -> None:
    """Has every engine that is built say so if its config has a block, and do nothing else."""
    original = host.DeepSpeedEngine.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        with contextlib.suppress(TypeError):
            given = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("config_class")
            first = os.environ.get("RANK", "0") == "0"
            if first and asks_for_coat(getattr(given, "_param_dict", None)) and not is_installed():
                _log.warning("the coat block is ignored, for %s=1 is set. Unset it to use COAT", DISABLE)
        return original(self, *args, **kwargs)

    host.DeepSpeedEngine.__init__ = __init__


def _wait(action: Callable[[ModuleType], None]) -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    sys.meta_path.insert(0, _Finder(action))


class _Finder:
    """Waits for `HOST` to be imported and exchanges its method then, by `action`."""

    def __init__(self, action: Callable[[ModuleType], None]):
        self._action = action

    def find_spec(self, name, path=None, target=None):
        if name != HOST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            # a DeepSpeed that is not as expected is an error where there is a block, not here
            if hasattr(module, "DeepSpeedEngine"):
                self._action(module)

        spec.loader.exec_module = exec_module
        return spec
