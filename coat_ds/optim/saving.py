"""Decoding of moments one at a time, while `torch.save` writes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_decoding: ContextVar[bool] = ContextVar("coat_ds_decoding_on_save", default=False)


@contextmanager
def decoding_on_save() -> Iterator[None]:
    """A context in which `CoatAdamW.state_dict` does not decode moments, and `torch.save` decodes each one
    when it writes it. Only for torch's zip format, and in this thread.
    """
    token = _decoding.set(True)
    try:
        yield
    finally:
        _decoding.reset(token)


def decodes_on_save() -> bool:
    return _decoding.get()


class DecodedStorage(torch.UntypedStorage):
    """The bytes of a moment's FP32 values, decoded by the call of `cpu`.

    `torch.save` first lists all storages. Then it calls `cpu` for storages on other devices and writes them,
    one after the other.
    """

    _moment: Any

    def __new__(cls, moment: torch.Tensor):
        # torch's type stubs lack these arguments
        storage = super().__new__(cls, 4 * moment.numel(), device="meta")  # type: ignore[call-arg]
        storage._moment = moment
        return storage

    def cpu(self) -> torch.UntypedStorage:
        return self._moment.decode("cpu").untyped_storage()
