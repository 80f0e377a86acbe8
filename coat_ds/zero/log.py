"""Lines in DeepSpeed's log."""

import logging


def say(text: str, level: int = logging.INFO) -> None:
    """Logs to DeepSpeed's log, on rank 0, if it shows warnings: DeepSpeed's default level would hide INFO."""
    from deepspeed.utils.logging import get_dist_msg, logger

    message = get_dist_msg(text, ranks=[0])
    if message is not None and logger.isEnabledFor(logging.WARNING):
        record = logger.makeRecord(logger.name, level, __file__, 0, message, (), None, "coat_ds")
        for handler in logger.handlers:
            handler.handle(record)
