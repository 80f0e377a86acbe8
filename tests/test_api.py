"""docs/api.md is up to date, and has every public name."""

import runpy
from pathlib import Path
from types import ModuleType

import coat_ds

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_page_is_that_of_its_file():
    made = runpy.run_path(str(DOCS / "api.py"))["text"]()
    assert (DOCS / "api.md").read_text() == made, "run python docs/api.py > docs/api.md"


def test_the_page_has_every_public_name():
    page = (DOCS / "api.md").read_text()
    for name in coat_ds.__all__:
        assert f"`coat_ds.{name}`" in page or isinstance(getattr(coat_ds, name), ModuleType), name
