"""The structure of the packages: no import circle, one direction between packages, a page in each room."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# each may import those before it
PACKAGES = {
    "coat_kernels": "kernels",
    "coat_ds": "coat_ds",
    "megatron_ext": "megatron_ext",
    "coat_launch": "launch",
}


def modules() -> dict[str, Path]:
    """The file of each module by its name."""
    found = {}
    for name, folder in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [name, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """The modules that each module imports, also inside functions and for type checkers."""
    files, found = modules(), defaultdict(set)
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                names = [f"{base}.{a.name}" if f"{base}.{a.name}" in files else base for a in node.names]
            found[name] |= {n for n in names if n in files} - {name}
    return found


def test_no_module_imports_itself_through_others(imports):
    done: set[str] = set()

    def follow(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in sorted(imports[name]):
                follow(other, (*above, name))
            done.add(name)

    for name in sorted(imports):
        follow(name, ())


def test_packages_import_those_below_them(imports):
    order = list(PACKAGES)
    for name, others in imports.items():
        own = order.index(name.partition(".")[0])
        above = [other for other in others if order.index(other.partition(".")[0]) > own]
        # the command `coat train` starts the training script
        assert not above or name == "coat_ds.cli", (name, above)


def test_folders_of_layers_import_one_way(imports):
    order = [f"coat_ds.layers.{name}" for name in ("detection", "modules", "parallel")]
    for name, others in imports.items():
        for i, folder in enumerate(order):
            above = [other for other in others for later in order[i + 1 :] if other.startswith(later)]
            assert not (name.startswith(folder) and above), (name, above)


def test_each_room_has_a_page():
    for name, path in modules().items():
        if path.name == "__init__.py" and name != "coat_ds":
            assert ast.get_docstring(ast.parse(path.read_text())), name


def test_files_that_a_page_of_a_room_names_exist():
    """The docstring of an `__init__.py` lists files of its own folder."""
    wrong = []
    for path in modules().values():
        if path.name == "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            named = re.findall(r"(?<![\w/.])\w+\.py\b", text)
            wrong += [f"{path}: {name}" for name in named if not list(path.parent.rglob(name))]
    assert not wrong
