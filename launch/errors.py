"""What is wrong with what the entry point was given. Each message names it and the way out."""


class LaunchError(ValueError):
    """Arguments that cannot be honoured."""


class DataError(ValueError):
    """Data that cannot be trained on."""
