"""How an unmodified script comes to honour the `"coat"` block.

Every DeepSpeed engine, the pipeline's and the hybrid one too, is built by `DeepSpeedEngine.__init__`.
`install` exchanges that one method, so that it works wherever and whenever a script got
`deepspeed.initialize` from. The new method looks for the block; without one it calls the original and
nothing else.

`pip install` makes `coat_autoload` an entry point of `torch.backends`, a group that torch loads at the end of
its own import, and that calls `register`. It puts a finder in front of `sys.meta_path`, which waits for
`deepspeed.runtime.engine` and goes away. So a Python that does not import torch runs none of this, and one
that does imports this file, `block` and `patches`, which need nothing but the standard library: 2 ms in all,
of torch's own 1.2 s. The rest of `coat_ds` is imported when an engine with a block is built.

`COAT_DISABLE=1` in the environment keeps `register` from doing anything but saying that a block is ignored,
`TORCH_DEVICE_BACKEND_AUTOLOAD=0`, torch's own switch, from being called; `install` ignores both.
"""

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable

from coat_ds.patches import Patch, PatchError
from coat_ds.versions import DEEPSPEED
from coat_ds.zero.block import asks_for_coat

ENGINE_MODULE = "deepspeed.runtime.engine"
DISABLE = "COAT_DISABLE"
ENGINE = Patch(
    "switch",
    "deepspeed",
    f"{ENGINE_MODULE}:DeepSpeedEngine.__init__",
    "engines honour the coat block; coat_ds.uninstall() undoes it",
    keywords=("model", "optimizer", "config_class"),
    way_out="or drop the coat block",
)
DISABLED = Patch(
    f"{DISABLE}=1",
    "deepspeed",
    f"{ENGINE_MODULE}:DeepSpeedEngine.__init__",
    "engines say that their coat block is ignored",
)

_log = logging.getLogger("coat_ds")


def install() -> None:
    """Has every DeepSpeed engine that is built from now on honour the `"coat"` block. May be called again.

    If DeepSpeed is not imported yet, this happens when it is.
    Raises RuntimeError if the installed DeepSpeed is not one that this was written for.
    """
    if ENGINE_MODULE in sys.modules:
        ENGINE.apply(_honouring)
    else:
        _wait(ENGINE, _honouring)


def uninstall() -> None:
    """Undoes `install`; engines that exist stay as they are. Does nothing if it is not installed.

    Raises RuntimeError if somebody else has exchanged the same method since.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    ENGINE.remove()


def is_installed() -> bool:
    """Whether the engines of the imported DeepSpeed honour the block."""
    return ENGINE.is_applied()


def register() -> None:
    """What `coat_autoload` calls at the end of torch's import."""
    disabled = os.environ.get(DISABLE) == "1"
    patch, make = (DISABLED, _saying_so) if disabled else (ENGINE, _honouring)
    if ENGINE_MODULE in sys.modules:
        patch.apply(make, checked=False)
    elif not disabled or not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        _wait(patch, make)


def _honouring(original: Callable) -> Callable:
    """The constructor of an engine that honours the block."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        if not asks_for_coat(getattr(bound.arguments.get("config_class"), "_param_dict", None)):
            return original(self, *args, **kwargs)
        _check_version()
        ENGINE.check()
        from coat_ds.zero import engine

        prepared = engine.prepare(bound.arguments)
        try:
            with prepared.units.building():
                original(*bound.args, **bound.kwargs)
            engine.finish(self, prepared)
        except BaseException:
            # the next engine of this model may have no block
            engine.give_back(prepared)
            raise

    return __init__


def _check_version() -> None:
    """Raises PatchError for a DeepSpeed that is not supported, before anything private of it is imported."""
    found = getattr(sys.modules["deepspeed"], "__version__", None)
    if found is not None and not DEEPSPEED.includes(found := found.strip()):
        raise PatchError(
            f"deepspeed: the coat block needs version {DEEPSPEED}, found {found}. pip install "
            f"'deepspeed{DEEPSPEED}', or drop the coat block."
        )


def _saying_so(original: Callable) -> Callable:
    """The constructor of an engine that says that its block is ignored, and does nothing else."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        with contextlib.suppress(TypeError):
            given = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("config_class")
            first = os.environ.get("RANK", "0") == "0"
            if first and asks_for_coat(getattr(given, "_param_dict", None)) and not is_installed():
                _log.warning("the coat block is ignored, for %s=1 is set. Unset it to use COAT", DISABLE)
        return original(self, *args, **kwargs)

    return __init__


def _wait(patch: Patch, make: Callable[[Callable], Callable]) -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    sys.meta_path.insert(0, _Finder(patch, make))


class _Finder:
    """Waits for `ENGINE_MODULE` to be imported and applies a patch then."""

    def __init__(self, patch: Patch, make: Callable[[Callable], Callable]):
        self._patch, self._make = patch, make

    def find_spec(self, name, path=None, target=None):
        if name != ENGINE_MODULE:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            # an import that fails may be tried again
            execute(module)
            if self not in sys.meta_path:
                return
            sys.meta_path.remove(self)
            # a DeepSpeed that is not as expected is an error where there is a block, not here
            if hasattr(module, "DeepSpeedEngine"):
                self._patch.apply(self._make, checked=False)

        spec.loader.exec_module = exec_module
        return spec
