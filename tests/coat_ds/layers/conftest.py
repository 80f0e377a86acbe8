"""transformers warns of much that small random models bring about."""

import warnings

import pytest


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
