"""How the `"coat"` block takes effect in an unmodified script.

Every DeepSpeed engine, including the pipeline and hybrid engines, is built by `DeepSpeedEngine.__init__`.
`install` replaces that one method, so that it works however a script imported `deepspeed.initialize`. The new
method looks for the block. Without a block it only calls the original.

`pip install` makes `coat_autoload` an entry point of `torch.backends`, a group that torch loads at the end of
its own import. The entry point calls `register`, which puts a finder first in `sys.meta_path`. The finder
removes itself when `deepspeed.runtime.engine` is imported. So a process that does not import torch runs none
of this code. A process that does imports this file, `block` and `patches`, which need only the standard
library and take a few milliseconds, compared to 1.2 s for torch. The rest of `coat_ds` is imported when an
engine with a block is built.

With `COAT_DISABLE=1` in the environment `register` does nothing. With `TORCH_DEVICE_BACKEND_AUTOLOAD=0`,
torch's own switch, `register` is not called. `install` ignores both.
"""

import inspect
import os
import sys
from collections.abc import Callable

from coat_ds.patches import Patch, PatchError, wrapping
from coat_ds.versions import DEEPSPEED
from coat_ds.zero.block import asks_for_coat

ENGINE_MODULE = "deepspeed.runtime.engine"
DISABLE = "COAT_DISABLE"
ENGINE = Patch(
    "switch",
    f"{ENGINE_MODULE}:DeepSpeedEngine.__init__",
    "engines read the coat block; coat_ds.uninstall() undoes it",
    parameters=("...", "model", "optimizer", "...", "config_class", "..."),
    remedy="or drop the coat block",
)


def install() -> None:
    """Has every DeepSpeed engine that is built from now on read the `"coat"` block. Calls may be repeated.

    If DeepSpeed is not imported yet, this takes effect at its import.
    Raises RuntimeError if the installed DeepSpeed is not supported.
    """
    _install(checked=True)


def _install(checked: bool) -> None:
    if ENGINE_MODULE in sys.modules:
        ENGINE.apply(wrapping(_init_with_coat_block), checked=checked)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def uninstall() -> None:
    """Undoes `install`; existing engines are unchanged. Does nothing if it is not installed.

    Raises RuntimeError if other code has replaced the same method since.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    ENGINE.remove()


def register() -> None:
    """Called by `coat_autoload` at the end of torch's import."""
    if os.environ.get(DISABLE) != "1":
        _install(checked=False)


def _init_with_coat_block(original: Callable, self, *args, **kwargs) -> None:
    """The constructor of an engine, which reads the block."""
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
        engine.restore_model(prepared)
        raise


def _check_version() -> None:
    """Raises PatchError for an unsupported DeepSpeed, before any of its private modules is imported."""
    found = getattr(sys.modules["deepspeed"], "__version__", None)
    if found is not None and not DEEPSPEED.includes(found := found.strip()):
        raise PatchError(
            f"deepspeed: the coat block needs version {DEEPSPEED}, found {found}. pip install "
            f"'deepspeed{DEEPSPEED}', or drop the coat block."
        )


class _Finder:
    """An import finder that applies the patch when `ENGINE_MODULE` is imported."""

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
            # an unsupported DeepSpeed raises an error when an engine with a block is built, not here
            if hasattr(module, "DeepSpeedEngine"):
                ENGINE.apply(wrapping(_init_with_coat_block), checked=False)

        spec.loader.exec_module = exec_module
        return spec
