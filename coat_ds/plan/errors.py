"""What cannot be planned."""


class PlanError(ValueError):
    """What cannot be planned. The message names the key, the value found and the way out."""
