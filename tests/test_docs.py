"""The pages are those of the code: what is made is up to date, what is shown twice is the same."""

import runpy
from pathlib import Path

from tests.test_readme import README, block

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_configuration_is_that_of_the_dataclasses():
    made = runpy.run_path(str(DOCS / "configuration.py"))["text"]()
    assert (DOCS / "configuration.md").read_text() == made, (
        "run python docs/configuration.py > docs/configuration.md"
    )


def test_pages_show_what_the_readme_shows():
    # which tests/test_readme.py runs
    assert block("bash") in (DOCS / "megatron.md").read_text()
    pages = (DOCS / "huggingface.md").read_text()
    for line in block("python").splitlines():
        assert line.split("  #")[0] in pages


def test_every_page_is_reached_from_the_readme():
    pages = {path.name for path in DOCS.glob("*.md")}
    assert {page for page in pages if f"](docs/{page})" not in README} == set()
