"""What users write wrongly, and what they are told: the key, what was found, what was expected, the way out.

docs/errors.md lists the messages, for those who search for theirs. It is made by

    python -m tests.test_mistakes > docs/errors.md
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mistakes import configs, others
from tests.mistakes.makers import Mistake

PAGE = Path(__file__).resolve().parents[1] / "docs/errors.md"
MISTAKES = configs.MISTAKES | others.MISTAKES
CASES = [pytest.param(m, id=f"{door}: {m.wrote}") for door, found in MISTAKES.items() for m in found]


def message(mistake: Mistake, folder: Path) -> str:
    """What the user reads, the folder left out. Fails if nothing was refused."""
    try:
        said = mistake.do(folder)
    except Exception as error:
        said = str(error)
    assert isinstance(said, str) and said, f"{mistake.wrote}: nothing was refused"
    return said.replace(f"{folder}{os.sep}", "").replace(str(folder), "runs").strip()


@pytest.mark.parametrize("mistake", CASES)
def test_the_message_names_key_value_and_way_out(mistake, tmp_path):
    said = message(mistake, tmp_path)
    assert [part for part in mistake.said if part not in said] == [], said
    # which the page shows
    assert f"\n{said}\n" in PAGE.read_text(), "run python -m tests.test_mistakes > docs/errors.md"


def page() -> Iterator[str]:
    """docs/errors.md."""
    yield "# Messages\n\n<!-- made by: python -m tests.test_mistakes > docs/errors.md -->\n"
    yield "What COAT says to mistakes that users make. Search this page for a part of your message.\n"
    for door, mistakes in MISTAKES.items():
        yield f"## {door}\n"
        for mistake in mistakes:
            with tempfile.TemporaryDirectory() as folder:
                said = message(mistake, Path(folder))
            yield f"**{mistake.wrote[:1].upper()}{mistake.wrote[1:]}**\n\n```text\n{said}\n```\n"


if __name__ == "__main__":
    print("\n".join(page()), end="")
