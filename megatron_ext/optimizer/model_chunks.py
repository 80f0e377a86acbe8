"""The model of a rank, from the chunks that Megatron has wrapped."""

import itertools
from collections.abc import Iterable, Iterator

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from coat_ds.config import CoatConfig, CoatConfigError, WatchConfig

# an attribute of an optimizer: the chunks of the model that it trains, and the settings of the watch
MODEL = "coat_model"


class ModelChunks(torch.nn.Module):
    """This rank's part of a model, under the names of the whole model: layers are numbered over all stages of
    the pipeline. It provides names only; the chunks run by themselves.

    chunks: without the wrappers of data parallelism and of BF16.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module]):
        super().__init__()
        # a tuple: as submodules they would have other names
        self.chunks = tuple(chunks)

    @property
    def training(self) -> bool:
        """That of the chunks, which change together."""
        return self.chunks[0].training

    @training.setter
    def training(self, _: bool) -> None:
        """torch's constructor sets it."""

    def named_modules(
        self, memo: set | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Same as `torch.nn.Module.named_modules`, over all chunks."""
        memo = set() if memo is None else memo
        for chunk in self.chunks:
            whole = {prefix: prefix}
            for name, module in chunk.named_modules(memo, prefix, remove_duplicate):
                if name not in whole:
                    parent, _, own = name.rpartition(".")
                    if own.isdigit() and isinstance(getattr(module, "layer_number", None), int):
                        own = str(module.layer_number - 1)
                    whole[name] = f"{whole[parent]}.{own}" if whole.get(parent) else own
                yield whole[name], module


def whole_model(chunks: Iterable[torch.nn.Module]) -> ModelChunks:
    """This rank's part of a model, from the chunks that Megatron has wrapped."""
    unwrapped = []
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        unwrapped.append(chunk)
    return ModelChunks(unwrapped)


def note_model(
    optimizer: MegatronOptimizer, model_chunks: Iterable[torch.nn.Module], coat: CoatConfig
) -> None:
    """Notes on an optimizer the model that Megatron built it for, unless the model cannot be watched.

    Raises CoatConfigError if it cannot, and `coat` configures the watch.
    """
    if any(getattr(chunk.ddp_config, "use_megatron_fsdp", False) for chunk in model_chunks):
        if coat.watch.every and coat.watch.folder:
            raise CoatConfigError(
                f"coat.watch.folder: found {coat.watch.folder!r} with --use-megatron-fsdp, whose parameters "
                'come and go. Set "watch": false, or remove --use-megatron-fsdp.'
            )
        return
    setattr(optimizer, MODEL, (list(model_chunks), coat.watch))


def models_of(chain: ChainedOptimizer) -> tuple[list[torch.nn.Module], WatchConfig | None]:
    """The chunks of the model that the optimizers of a chain train, and the settings of their watch; an empty
    list and None if `patches.watch` did not run before the optimizers were built."""
    noted = list(_noted(chain))
    chunks = dict.fromkeys(itertools.chain.from_iterable(chunks for chunks, _ in noted))
    return list(chunks), noted[0][1] if noted else None


def _noted(part: MegatronOptimizer) -> Iterator[tuple[list[torch.nn.Module], WatchConfig]]:
    for inner in getattr(part, "chained_optimizers", ()):
        yield from _noted(inner)
    if hasattr(part, MODEL):
        yield getattr(part, MODEL)
