"""Whether a machine and its packages are fit: what is found, of what is wrong the way out.

It may import every other room of `coat_ds`. Start at command.py.
Checks that `launch/preflight.py` makes on every node are the same functions.
"""

from coat_ds.doctor.finding import OK, PROBLEM, UNKNOWN, WARNING, Finding

__all__ = ["OK", "PROBLEM", "UNKNOWN", "WARNING", "Finding"]
