"""The tables of docs/, made of the files in benchmarks/results.

Each stands on its page between two marks, where `python -m benchmarks report` writes it.
"""

from benchmarks.tables import gradients, huggingface, numerics, others, performance  # noqa: F401  (they register themselves)
from benchmarks.tables.blocks import BLOCKS, DOCS, Results, filled, page, write

__all__ = ["BLOCKS", "DOCS", "Results", "filled", "page", "write"]
