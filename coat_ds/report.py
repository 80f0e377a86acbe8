"""What an engine's first training forward keeps for backward, counted once."""

from collections.abc import Callable

import torch

from coat_kernels.saved import packed_bytes


def report_saved(module: torch.nn.Module, say: Callable[[str], None]) -> None:
    """Has `say` told, after the first forward pass of `module` with gradients, what it keeps for backward.

    Counted are storages that autograd saves, once each, without parameters and buffers, and packed inputs of
    checkpointed regions; inputs that DeepSpeed's checkpointing keeps as they are do not go through autograd.
    """
    existing = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}
    counting: list[torch.autograd.graph.saved_tensors_hooks] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in existing:
            # held, so that no address is used twice
            kept[storage.data_ptr()] = storage
        # ZeRO-3 fills and empties the very parameter; what a node made itself it must not hold
        return x if x.is_leaf else x.detach()

    @torch.compiler.disable
    def enter(*_):
        if torch.is_grad_enabled() and module.training:
            counting.append(torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))
            counting[-1].__enter__()

    @torch.compiler.disable
    def leave(*_):
        if not counting:
            return
        counting.pop().__exit__(None, None, None)
        for handle in handles:
            handle.remove()
        plain = sum(storage.nbytes() for storage in kept.values())
        kept.clear()
        codes, instead_of = packed_bytes()
        say(
            f"COAT: the first forward keeps {plain + codes:,} bytes for backward: {plain:,} as they are, and "
            f"{codes:,} of checkpointed inputs in FP8 in place of {instead_of:,}"
        )

    handles = [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]
