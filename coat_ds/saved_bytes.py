"""What is kept for backward, counted: the storages that autograd saves."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from coat_ds.optim.shards import is_distributed, local
from coat_kernels.autograd.checkpointing import MIN_NUMEL, alive_packed, packed_bytes


class SavedStorages:
    """The storages that autograd saves within `counting`, each once and whole.

    is_left_out: says of the address of a storage that it does not count, as a weight's.
    """

    def __init__(self, is_left_out: Callable[[int], bool]):
        self._is_left_out = is_left_out
        # held, so that no address is used twice, but for those that Megatron's recompute empties
        self._kept: dict[int, torch.UntypedStorage] = {}

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())

    def counting(self) -> AbstractContextManager:
        """A context for a forward pass, or a part of one."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def is_on_top(self) -> bool:
        """Whether autograd gives what it saves to this object now, and to no other hook."""
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
        # a leaf as it is: ZeRO-3 fills and empties the parameter itself. No other tensor: one that is kept by
        # the node that made it would never be freed
        return x if x.is_leaf else x.detach()


def is_weight_of(module: torch.nn.Module) -> Callable[[int], bool]:
    """Says of a storage's address whether a parameter or a buffer of `module` is there. A DTensor has none:
    what this rank holds of it has."""
    modules = list(module.modules())
    held = [own for m in modules for own in (m._parameters, m._buffers)]
    tensors = [t for own in held for t in own.values() if t is not None]
    existing = {local(t).untyped_storage().data_ptr() for t in tensors}
    # ZeRO-3 and FSDP2 put gathered weights elsewhere each time, FSDP2 other parameters in their place
    gathers = any(hasattr(t, "ds_status") or is_distributed(t) for t in tensors)
    holders = [m._parameters for m in modules if m._parameters] if gathers else []

    def is_weight(address: int) -> bool:
        if address in existing:
            return True
        gathered = (p for held in holders for p in held.values() if p is not None and not is_distributed(p))
        return any(p.untyped_storage().data_ptr() == address for p in gathered)

    return is_weight


def report_saved(module: torch.nn.Module, say: Callable[[str], None]) -> None:
    """Has `say` told, after the first forward pass of `module` with gradients, what it keeps for backward.

    Counted are storages that autograd saves, once each, without parameters and buffers, also those that
    ZeRO-3 has gathered meanwhile, and packed inputs of checkpointed regions; inputs that DeepSpeed's
    checkpointing keeps as they are do not go through autograd.
    """
    is_weight = is_weight_of(module)

    @contextlib.contextmanager
    def counting() -> Iterator[None]:
        saved = SavedStorages(is_weight)
        with saved.counting():
            yield
        plain = saved.nbytes
        codes, instead_of = packed_bytes()
        say(
            f"COAT: the first forward keeps {plain + codes:,} bytes for backward: {plain:,} as they are, and "
            f"{codes:,} of checkpointed inputs in FP8 in place of {instead_of:,}"
        )

    around_first_forward(module, counting)


def report_compressed(
    module: torch.nn.Module, say: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Has `say` told, after the first forward pass of `module` with gradients, how many inputs of
    checkpointed regions it keeps in FP8, in how many bytes; `warn`, if there are none.
    """

    @contextlib.contextmanager
    def comparing() -> Iterator[None]:
        before = set(alive_packed())
        yield
        made = [packed for packed in alive_packed() if packed not in before]
        if made:
            codes, instead_of = (sum(getattr(p, name) for p in made) for name in ("nbytes", "plain_nbytes"))
            say(
                f"COAT: {len(made)} checkpointed inputs are kept in FP8, in {codes:,} bytes in place of "
                f"{instead_of:,}"
            )
        else:
            warn(
                "coat.checkpointing.compress: found True, but the first forward has checkpointed no "
                f"activation of {MIN_NUMEL:,} elements or more, so that nothing is compressed. Turn on the "
                "model's activation checkpointing (Hugging Face: gradient_checkpointing; Megatron: "
                "recompute_granularity), or drop the key."
            )

    around_first_forward(module, comparing)


def around_first_forward(module: torch.nn.Module, context: Callable[[], AbstractContextManager]) -> None:
    """Enters `context` for the first forward of `module` in training with gradients that comes to its end."""
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
            # it has failed: torch hands on what there is
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
    """The forward that was watched has not come to its end."""
