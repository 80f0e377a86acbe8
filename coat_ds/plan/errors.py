"""The error for input that cannot be planned."""


class PlanError(ValueError):
    """The input cannot be planned. The message names the key, the value found and what to do."""
