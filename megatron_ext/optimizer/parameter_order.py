"""The order of parameters in optimizer checkpoints of `dp_reshardable`, Megatron-LM's default.

Their tensors are whole gradient buffers, in which only the position identifies a parameter. A model with the
same number of elements in another order would read other parameters' masters and moments, without an error.
Examples are grouped experts in place of experts one after another, or the other one of two equal layers
frozen. So the checkpoint has the shapes of a buffer's parameters, under `coat_shapes` in the parameter
groups, and the names of the model's frozen parameters, under `coat_frozen`. Both are compared when states are
loaded. Checkpoints without them load without a check.
"""

from collections.abc import Callable

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from coat_ds.config import CoatConfigError

SHAPES, FROZEN, SHARDING = "coat_shapes", "coat_frozen", "dp_reshardable"


def _shapes(optimizer: DistributedOptimizer) -> list[list[int]]:
    """Shapes of the parameters of all buffers, in order, without sizes of 1: one expert equals its matrix."""
    return [[n for n in p.shape if n > 1] for buffer in optimizer.buffers for p in buffer.params]


def _frozen(optimizer: DistributedOptimizer) -> list[tuple[str, bool]]:
    """All parameters of the model, in order, and whether Megatron collects no gradient for them."""
    return [
        (name, p not in chunk.param_to_bucket_group)
        for chunk in optimizer.model_chunks
        for name, p in chunk.named_parameters()
    ]


def save(save_own: Callable, self: DistributedOptimizer, *args, **kwargs) -> dict:
    """Adds both to what `DistributedOptimizer.sharded_state_dict` returns for `dp_reshardable`."""
    packed = save_own(self, *args, **kwargs)
    if packed.get("param_state_sharding_type") == SHARDING:
        frozen = [is_frozen for _, is_frozen in _frozen(self)]
        packed["optimizer"].data.update({SHAPES: _shapes(self), FROZEN: frozen})
    return packed


def load(load_own: Callable, self: DistributedOptimizer, state_dict: dict) -> None:
    """Compares them in `DistributedOptimizer.load_state_dict`. Raises CoatConfigError where they differ."""
    if state_dict.get("param_state_sharding_type") == SHARDING:
        _compare_shapes(self, state_dict["optimizer"].get(SHAPES))
        _compare_frozen(self, state_dict["optimizer"].get(FROZEN))
    return load_own(self, state_dict)


def _compare_shapes(optimizer: DistributedOptimizer, saved: list[list[int]] | None) -> None:
    if saved is None or saved == (own := _shapes(optimizer)):
        return
    pairs = enumerate(zip(saved, own, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(saved), len(own)))
    there, here = (shapes[index] if index < len(shapes) else "none" for shapes in (saved, own))
    raise CoatConfigError(
        f"--load: optimizer states of {SHARDING}: expected parameter {index} of a rank to be {here}, found "
        f"{there}, so that states would go to other parameters. Give --moe-grouped-gemm as the run that "
        "saved them did, or --no-load-optim; a checkpoint of --dist-ckpt-optim-fully-reshardable takes "
        "either kind of experts."
    )


def _compare_frozen(optimizer: DistributedOptimizer, saved: list[bool] | None) -> None:
    own = _frozen(optimizer)
    # only with equal numbers, since the same parameters have other names in the hybrid stack
    if saved is None or len(saved) != len(own):
        return
    for (name, here), there in zip(own, saved, strict=True):
        if here != there:
            state = ("trained", "frozen")
            raise CoatConfigError(
                f"--load: optimizer states of {SHARDING}: {name} is {state[here]}, and was {state[there]} in "
                "the run that saved them, so that states would go to other parameters. Freeze what that run "
                "did, or give --no-load-optim."
            )
