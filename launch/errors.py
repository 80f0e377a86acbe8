"""The one error of this package."""


class LaunchError(ValueError):
    """Arguments, data, files or nodes that cannot be used. The message names them and the fix."""
