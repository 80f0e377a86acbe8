"""Counts the bytes saved for backward: the storages that autograd saves."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from coat_ds.optim.shards import is_distributed, local
from coat_kernels.autograd.checkpointing import MIN_NUMEL, alive_packed


class SavedStorages:
    """The storages that autograd saves within `counting`. Each storage counts once, with all its bytes.

    is_left_out: returns True for the address of a storage that is not counted, such as a weight's.
    """

    def __init__(self, is_left_out: Callable[[int], bool]):
        self._is_left_out = is_left_out
        # references, so that no address is reused, except those of storages that Megatron's recompute empties
        self._kept: dict[int, torch.UntypedStorage] = {}

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())

    def counting(self) -> AbstractContextManager:
        """A context for a forward pass or a part of a forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def is_on_top(self) -> bool:
        """Whether this object's hooks are the innermost saved-tensor hooks of autograd."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and hooks[0] == self._pack

    def _keep(self, address: int, storage: torch.UntypedStorage) -> None:
        self._kept[address] = storage

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        storage = local(x).untyped_storage()
        address = storage.data_ptr()
        kept = self._kept.get(address)
        if (kept is None or kept.data_ptr() != address) and not self._is_left_out(address):
            self._keep(address, storage)
        # A leaf is returned itself, since ZeRO-3 fills and empties the parameter object. Any other tensor is
        # detached: one that its own grad_fn saves would be in a reference cycle, which is never freed
        return x if x.is_leaf else x.detach()


def is_weight_of(module: torch.nn.Module) -> Callable[[int], bool]:
    """A function that returns whether a storage's address is that of a parameter or a buffer of `module`. For
    a DTensor the storage is that of this rank's local tensor."""
    modules = list(module.modules())
    held = [own for m in modules for own in (m._parameters, m._buffers)]
    tensors = [t for own in held for t in own.values() if t is not None]
    existing = {local(t).untyped_storage().data_ptr() for t in tensors}
    # ZeRO-3 and FSDP2 gather weights into new storages each time; FSDP2 also exchanges the parameters
    gathers = any(hasattr(t, "ds_status") or is_distributed(t) for t in tensors)
    holders = [m._parameters for m in modules if m._parameters] if gathers else []

    def is_weight(address: int) -> bool:
        if address in existing:
            return True
        gathered = (p for held in holders for p in held.values() if p is not None and not is_distributed(p))
        return any(p.untyped_storage().data_ptr() == address for p in gathered)

    return is_weight


def report_compressed(
    module: torch.nn.Module, say: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Calls `say` after the first forward pass of `module` with gradients, with the number and bytes of the
    checkpointed inputs kept in FP8. Calls `warn` instead if there are none.
    """

    @contextlib.contextmanager
    def comparing() -> Iterator[None]:
        before = set(alive_packed())
        yield
        made = [packed for packed in alive_packed() if packed not in before]
        if made:
            codes, instead_of = (sum(getattr(p, name) for p in made) for name in ("nbytes", "plain_nbytes"))
            say(
                f"{len(made)} checkpointed inputs are kept in FP8, in {codes:,} bytes in place of "
                f"{instead_of:,}"
            )
        else:
            warn(
                "coat.fp8_activation_checkpointing: found True, but the first forward has checkpointed no "
                f"activation of {MIN_NUMEL:,} elements or more, so that nothing is compressed. Turn on the "
                "model's activation checkpointing (Hugging Face: gradient_checkpointing; Megatron: "
                "recompute_granularity), or drop the key."
            )

    around_first_forward(module, comparing)


def around_first_forward(module: torch.nn.Module, context: Callable[[], AbstractContextManager]) -> None:
    """Enters `context` for each training forward of `module` with gradients, until one ends without error."""
    entered: list[AbstractContextManager] = []

    @torch.compiler.disable
    def enter(*_):
        if torch.is_grad_enabled() and module.training:
            entered.append(context())
            entered[-1].__enter__()

    @torch.compiler.disable
    def leave(_module, _args, output):
        if not entered:
            return
        if output is None:
            # the forward has raised: torch then calls the hook without an output
            entered.pop().__exit__(_Failed, _Failed(), None)
            return
        for handle in handles:
            handle.remove()
        entered.pop().__exit__(None, None, None)

    handles = [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]


class _Failed(Exception):
    """The counted forward has raised."""
