"""Errors in the entry point's inputs. Each message names the input and the fix."""


class LaunchError(ValueError):
    """Arguments that are not supported."""


class DataError(ValueError):
    """Data that cannot be used for training."""
