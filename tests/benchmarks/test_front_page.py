"""The README's table matches the committed results, and compares cases of one run."""

import shutil

import pytest

from benchmarks import front_page
from benchmarks.common.harness import RESULTS


@pytest.fixture
def results(tmp_path):
    for name in (front_page.MODELS, front_page.LARGER, front_page.LOSSES):
        shutil.copy(RESULTS / name, tmp_path)
    return tmp_path


def test_the_committed_table_is_that_of_the_committed_files():
    readme = front_page.README.read_text()
    assert front_page.page(readme, RESULTS) == readme, "run python -m benchmarks report"
    changed = readme.replace("| COAT | ", "| COAT | 1", 1)
    assert changed != readme and front_page.page(changed, RESULTS) == readme
    with pytest.raises(ValueError, match="README.md: expected '<!-- end -->' behind"):
        front_page.page(readme.replace("<!-- end -->", ""), RESULTS)
