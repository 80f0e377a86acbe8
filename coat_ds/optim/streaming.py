"""Moments that are decoded one at a time, while `torch.save` writes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_streaming: ContextVar[bool] = ContextVar("coat_ds_streaming", default=False)


@contextmanager
def streaming() -> Iterator[None]:
    """Within it `torch.save` decodes moments one at a time, each when it is written, and
    `CoatAdamW.state_dict` leaves them to it. Only for its zip format, and in this thread.
    """
    token = _streaming.set(True)
    try:
        yield
    finally:
        _streaming.reset(token)


def is_streaming() -> bool:
    return _streaming.get()


class DecodedStorage(torch.UntypedStorage):
    """The bytes of a moment's FP32 values, which exist once somebody asks for them on the CPU.

    `torch.save` notes all storages first, then asks for those that are on another device and writes them, one
    after the other.
    """

    _moment: Any

    def __new__(cls, moment: torch.Tensor):
        # torch's types know no arguments of it
        storage = super().__new__(cls, 4 * moment.numel(), device="meta")  # type: ignore[call-arg]
        storage._moment = moment
        return storage

    def cpu(self) -> torch.UntypedStorage:
        return self._moment.decode("cpu").untyped_storage()
