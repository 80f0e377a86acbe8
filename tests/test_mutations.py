"""The mistakes of `tests.mutations` still apply to the code. `make mutations` checks that tests
find them."""

import pytest

from tests.mutations import MUTATIONS, ROOT, place_of


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_the_text_that_is_changed_is_there_once(mutation):
    assert place_of(mutation.old, ROOT).read_text().count(mutation.old) == 1
