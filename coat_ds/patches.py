"""Patches: attributes of the frameworks that this project replaces where there is no other way.

Each is declared once, as a `Patch`. Applying it first checks the framework's signature against the expected
one, and logs one line. Applying it a second time does nothing. The original stays reachable, and `remove`
restores it.

    coat patches

lists all patches and checks them against the installed frameworks. This file imports only the standard
library, since it is imported along with torch.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from coat_ds.versions import DEEPSPEED, MEGATRON_CORE, TORCH, Supported

# the distribution of each package that is patched, and its supported versions
FRAMEWORKS = {
    "deepspeed": ("deepspeed", DEEPSPEED),
    "megatron": ("megatron-core", MEGATRON_CORE),
    "torch": ("torch", TORCH),
}
# as strings: these modules import this file, and Megatron's adapter may not be importable
DECLARED_IN = (
    "coat_ds.checkpointing",
    "coat_ds.zero.autoload",
    "coat_ds.zero.engine",
    "coat_ds.zero.checkpoints",
    "coat_ds.zero.offloading",
    "coat_ds.zero.gradients",
    "coat_ds.zero.grad_norm",
    "coat_ds.zero.module_hooks",
    "coat_ds.zero.layer_units",
    "coat_ds.zero.recompute",
    "coat_ds.zero.watch",
    "megatron_ext.layers.moe",
    "megatron_ext.layers.latent",
    "megatron_ext.optimizer.patches",
    "megatron_ext.optimizer.parameter_order",
    "megatron_ext.layers.process_groups",
    "megatron_ext.layers.recompute",
    "megatron_ext.layers.torch_norm",
    "megatron_ext.optimizer.watch",
    "megatron_ext.cpu",
)
# the attribute of a patched object that holds its records
RECORDS = "_coat_patches"


class _ABSENT:
    """Marks a missing attribute. A class, since copies of a class are the class itself."""


_declared: dict[tuple[str, str], "Patch"] = {}
_lock = threading.RLock()


class PatchError(RuntimeError):
    """The framework differs from what a patch expects. The message names the framework's version, the symbol,
    what was expected and what was found."""


class Record(NamedTuple):
    """An applied patch."""

    before: Any
    """The owner's own attribute before the patch; `_ABSENT` if it was inherited from a class."""
    original: Any
    replacement: Any


@dataclass(eq=False)
class Patch:
    """One attribute of a framework, and what replacing it relies on.

    A patch applies to the whole process or, with `on`, to one object, such as an engine or an optimizer.
    Objects hold their records themselves, so that no record outlives its object.
    """

    name: str
    """The feature that needs the patch. Several patches may share a name."""
    target: str
    """module:path, of a package in `FRAMEWORKS`. For a patch on objects it is the path of the class's
    attribute."""
    why: str
    """What the patch is for."""
    parameters: tuple[str, ...] | None = None
    """Expected parameters of the function, or of the class's `forward`, without self; "..." allows others in
    its place. None: any."""
    expected: str = "a function"
    """What the attribute has to be, for messages."""
    used_by: str | None = None
    """Path of the function or class that looks the name up when it runs; "" for the module."""
    instance: bool = False
    """The attribute is not on the class that the target names; the class sets or reads it on objects."""
    optional: bool = False
    """Some supported versions lack the attribute and need no patch."""
    missing: bool = False
    """The framework reads the attribute, but does not define it."""
    remedy: str = ""
    """How to avoid the need for the patch, for messages."""

    _record: Record | None = field(default=None, init=False, repr=False)
    _objects: weakref.WeakSet = field(default_factory=weakref.WeakSet, init=False, repr=False)
    _logged: bool = field(default=False, init=False, repr=False)

    def __post_init__(self):
        _declared[self.name, self.target] = self

    @property
    def _framework(self) -> tuple[str, Supported]:
        return FRAMEWORKS[self.target.partition(":")[0].partition(".")[0]]

    @property
    def distribution(self) -> str:
        """The distribution that has the target."""
        return self._framework[0]

    @property
    def attribute(self) -> str:
        return self.target.rpartition(":")[2].rpartition(".")[2]

    @property
    def symbol(self) -> str:
        return self.target.replace(":", ".")

    def owner(self) -> Any:
        """Imports and returns the module or class with the attribute. Raises PatchError if there is none."""
        module, _, path = self.target.partition(":")
        owner = importlib.import_module(module)
        for part in path.split(".")[:-1]:
            owner = getattr(owner, part, _ABSENT)
            if owner is _ABSENT:
                raise self._error("nothing")
        return owner

    def check(self, on: Any = None) -> None:
        """Raises PatchError unless the framework, or `on`, has the expected attribute."""
        if self.instance and on is None:
            if self.attribute not in _names(self.owner()):
                raise self._error("a class that does not use it")
            return
        owner = self.owner() if on is None else on
        found = getattr(owner, self.attribute, _ABSENT)
        if found is _ABSENT:
            if self.missing:
                return
            raise self._error("nothing")
        self._check_signature(found)
        if self.used_by is not None:
            module = sys.modules[self.target.partition(":")[0]]
            user = _follow(module, self.used_by)
            if user is _ABSENT or self.attribute not in _names(user):
                raise self._error(f"that {self.used_by or module.__name__} does not look it up")

    def _check_signature(self, found: Any) -> None:
        if self.parameters is None:
            return
        function = getattr(found, "forward", None) if isinstance(found, type) else found
        if not callable(function):
            raise self._error(f"{found!r}")
        names = tuple(name for name in inspect.signature(function).parameters if name != "self")
        pattern = "".join(r"(\w+,)*" if name == "..." else f"{name}," for name in self.parameters)
        if not re.fullmatch(pattern, "".join(f"{name}," for name in names)):
            raise self._error(f"({', '.join(names)})")

    def _error(self, found: str) -> PatchError:
        expected = self.expected
        if self.parameters is not None:
            expected += f" of ({', '.join(self.parameters)})"
        remedy = f", {self.remedy}" if self.remedy else ""
        distribution, supported = self._framework
        return PatchError(
            f"{self.symbol}: expected {expected}, found {found} in {distribution} {_version(distribution)}. "
            f"Install {distribution}{supported}{remedy}."
        )

    def is_applied(self, on: Any = None) -> bool:
        """Whether the patch is in place, also if other code has wrapped it since (`__wrapped__`)."""
        return self._find(on) is not None

    def _find(self, on: Any = None) -> Record | None:
        record = self._record if on is None else vars(on).get(RECORDS, {}).get(self)
        if record is None:
            return None
        owner = _follow_imported(self.target) if on is None else on
        found = getattr(owner, self.attribute, _ABSENT)
        while found is not _ABSENT and found is not record.replacement:
            found = getattr(found, "__wrapped__", _ABSENT)
        return None if found is _ABSENT else record

    def original(self) -> Any:
        """The framework's own attribute, whether the patch is applied to the process or not."""
        record = self._find()
        return getattr(self.owner(), self.attribute) if record is None else record.original

    def apply(self, make: Callable[[Any], Any], on: Any = None, checked: bool = True) -> bool:
        """Replaces the original by `make(original)`; returns False if the patch is already applied.

        on: the object to patch; None patches the framework's own module or class.
        checked: False if the caller calls `check` later.
        Raises PatchError, before anything is changed, if the framework is not as expected.
        """
        if self.is_applied(on):
            return False
        with _lock:
            if self.is_applied(on):
                return False
            if checked:
                self.check(on)
            owner = self.owner() if on is None else on
            original = getattr(owner, self.attribute, _ABSENT)
            record = Record(vars(owner).get(self.attribute, _ABSENT), original, make(original))
            setattr(owner, self.attribute, record.replacement)
            if on is None:
                self._record = record
            else:
                vars(on).setdefault(RECORDS, {})[self] = record
                self._objects.add(on)
        if not self._logged:
            # imported here: this file is imported along with torch, which that one needs
            from coat_ds.log import log_rank_0

            version = _version(self.distribution)
            log_rank_0(f"patched {self.symbol} of {self.distribution} {version}: {self.why}", logging.DEBUG)
        self._logged = True
        return True

    def remove(self, on: Any = None) -> bool:
        """Restores the original; returns False if the patch is not in place.

        Raises RuntimeError if other code has wrapped the patch since.
        """
        with _lock:
            record, owner = self._find(on), _follow_imported(self.target) if on is None else on
            if record is not None and getattr(owner, self.attribute) is not record.replacement:
                raise RuntimeError(f"{self.symbol}: was exchanged again after COAT's patch. Undo that first.")
            self._forget(on)
            if record is None:
                return False
            if record.before is not _ABSENT:
                setattr(owner, self.attribute, record.before)
            elif isinstance(owner, ModuleType) and record.original is not _ABSENT:
                # a module that computes its attributes, such as torch's configs
                setattr(owner, self.attribute, record.original)
            else:
                delattr(owner, self.attribute)
            return True

    def _forget(self, on: Any) -> None:
        if on is None:
            self._record = None
            return
        self._objects.discard(on)
        records = vars(on).get(RECORDS, {})
        records.pop(self, None)
        if not records:
            vars(on).pop(RECORDS, None)

    @contextlib.contextmanager
    def applied(self, make: Callable[[Any], Any], on: Any = None) -> Iterator[None]:
        """A context in which the patch is applied."""
        done = self.apply(make, on)
        try:
            yield
        finally:
            if done:
                self.remove(on)

    def __deepcopy__(self, memo):
        # copies of a patched object refer to the same patch in their records
        return self


def wrapping(function: Callable[..., Any], *first: Any) -> Callable[[Callable], Callable]:
    """For `Patch.apply`: the original's replacement returns function(*first, original, *args, **kwargs)."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            return function(*first, original, *args, **kwargs)

        return wrapper

    return make


class _Requirement(Patch):
    """A function that is called and not replaced. It is in no table."""

    def __post_init__(self):
        pass


def require(target: str, parameters: tuple[str, ...], remedy: str = "") -> None:
    """Raises PatchError unless the framework has a function with these parameters. It is not replaced."""
    _Requirement("", target, "", parameters=parameters, remedy=remedy).check()


class Row(NamedTuple):
    """One patch in `table`."""

    name: str
    target: str
    framework: str
    """Name and version, or "not installed"."""
    applied: bool
    why: str
    """The purpose of the patch or, if it does not fit the installed framework, the reason."""


def table() -> list[Row]:
    """All patches, applied or not. Imports the frameworks that are installed."""
    rows, missing = [], []
    for module in DECLARED_IN:
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing.append(Row(module, "", "not installed", False, f"cannot be imported: {error}"))
    for patch in list(_declared.values()):
        version = _version(patch.distribution)
        applied = patch.is_applied() or len(patch._objects) > 0
        why = patch.why if applied or version == "not installed" else _obstacle(patch) or patch.why
        rows.append(Row(patch.name, patch.symbol, f"{patch.distribution} {version}", applied, why))
    return rows + missing


def _obstacle(patch: Patch) -> str:
    """Why a patch cannot be applied to the installed framework; an empty string if it can."""
    try:
        patch.check()
    except (ImportError, PatchError) as error:
        return "not in this version, which needs no patch" if patch.optional else str(error)
    return ""


def text(rows: Sequence[Row]) -> str:
    """The table as text, one line a patch."""
    shown = [(r.name, r.target, r.framework, "yes" if r.applied else "no", r.why) for r in rows]
    shown.insert(0, ("patch", "of", "framework", "applied", "why"))
    widths = [max(map(len, column)) for column in list(zip(*shown, strict=True))[:-1]]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in shown
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _follow(owner: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        owner = getattr(owner, part, _ABSENT)
    return owner


def _follow_imported(target: str) -> Any:
    """The owner of the attribute; `_ABSENT` if its module is not imported."""
    module, _, path = target.partition(":")
    return _follow(sys.modules.get(module, _ABSENT), path.rpartition(".")[0])


def _names(x: Any) -> set[str]:
    """The names of globals and attributes that the code of a module, class or function uses."""
    if isinstance(x, CodeType):
        return {*x.co_names, *(name for c in x.co_consts if isinstance(c, CodeType) for name in _names(c))}
    if isinstance(x, type | ModuleType):
        own = x.__name__ if isinstance(x, ModuleType) else x.__module__
        inside = [v for v in vars(x).values() if getattr(v, "__module__", None) == own]
        inside += [f for v in vars(x).values() if isinstance(v, property) for f in (v.fget, v.fset) if f]
        return {name for part in inside for name in _names(part)}
    return _names(getattr(inspect.unwrap(getattr(x, "__func__", x)), "__code__", (lambda: 0).__code__))
