"""Checks whether a machine and its packages are ready: findings, and a fix for each problem.

This package may import every other package of `coat_ds`. Start at command.py.
"""

from coat_ds.doctor.finding import OK, PROBLEM, UNKNOWN, WARNING, Finding

__all__ = ["OK", "PROBLEM", "UNKNOWN", "WARNING", "Finding"]
