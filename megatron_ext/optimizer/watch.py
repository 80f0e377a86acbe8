"""`coat_ds.watch` in Megatron: the end of a step, the destinations of readings, and the state in checkpoints.

All code that trains with megatron-core builds its optimizer by `get_megatron_optimizer`. `install()` patches
the function that builds the optimizer's parts, which receives the model, and the constructor of the chain
that holds them. From then on a chain has `coat_watch`, a `Watch` or None. A reading ends with
`ChainedOptimizer.step`.

Readings go to Megatron-LM's writers (`--tensorboard-dir`, `--wandb-project`), if its scripts run, and to
`coat.watch.folder`. The last rank writes both, as it does Megatron-LM's own numbers. Sums are over all ranks,
under pipeline parallelism by the names of the whole model, so that all ranks have the same readings and fall
back together. A checkpoint stores the layers that have fallen back, if any, under `coat_watch` in the first
optimizer's state.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.utils import log_single_rank

from coat_ds.config import CoatConfigError, WatchConfig
from coat_ds.layers.inventory import layers_of
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.patches import Patch
from coat_ds.watch.fallback import KEY
from coat_ds.watch.outs import writer
from coat_ds.watch.states import Places
from coat_ds.watch.watch import Watch
from megatron_ext import options
from megatron_ext.layers.grouped_experts import GroupedLinear
from megatron_ext.optimizer.adamw import MegatronAdamW, linked
from megatron_ext.optimizer.chunks import whole_model

logger = logging.getLogger(__name__)

_patch = functools.partial(Patch, "watch of Megatron", "megatron-core")
_OPTIMIZER = "megatron.core.optimizer"
_CHAIN = f"{_OPTIMIZER}.optimizer:ChainedOptimizer"
_PART = f"{_OPTIMIZER}.optimizer:MegatronOptimizer"
BUILD = _patch(
    f"{_OPTIMIZER}:_get_megatron_optimizer_based_on_param_groups",
    "it receives the model",
    parameters=("config", "model_chunks", "..."),
)
CHAIN = _patch(f"{_CHAIN}.__init__", "it holds all optimizers", parameters=("chained_optimizers",))
INSTALLED = (BUILD, CHAIN)
# patched on one chain
STEP = _patch(f"{_CHAIN}.step", "a reading ends with a step", parameters=())
# patched on the chain's first optimizer
SAVE, SAVE_SHARDED = (
    _patch(f"{_PART}.{name}", "layers that have fallen back are saved with the states")
    for name in ("state_dict", "sharded_state_dict")
)
LOAD = _patch(
    f"{_PART}.load_state_dict",
    "layers that had fallen back do so before states are loaded",
    parameters=("state_dict",),
)
# an attribute of a model whose layers the log has counted
SAID = "coat_layers_said"


def watch_optimizer(chain: ChainedOptimizer, config: WatchConfig) -> Watch | None:
    """Watches the model of a chain of optimizers whose construction `install` has patched, by `config`. None
    without such a model, or if "every" is 0.

    Call it on every rank. If `install` already watches the chain, that watch ends.
    """
    chunks = _chunks_of_chain(chain)
    if not chunks or not config.every:
        return None
    model = whole_model(chunks)
    ours = [part for part in chain.chained_optimizers if isinstance(part.optimizer, MegatronAdamW)]
    named = dict(model.named_parameters())
    names = {p: name for name, p in named.items()}

    def held() -> Iterator[tuple[MegatronAdamW, torch.Tensor, torch.Tensor]]:
        for part in ours:
            for _, model_param, own, _ in linked(part):
                yield part.optimizer, model_param, own

    def places() -> Places:
        return {own: [(names[p], 0, own.numel())] for _, p, own in held() if p in names}

    def keep(name: str, whether: bool) -> None:
        for optimizer, model_param, own in held():
            if model_param is named.get(name):
                optimizer.keep(own, whether)

    optimizers = [part.optimizer for part in ours]
    # Megatron-LM counts steps; in a user's own loop the watch does
    host = options.megatron_lm()
    watch = Watch(
        model,
        optimizers,
        config,
        _writers(),
        forwards=model.chunks,
        places=places,
        masters=lambda: [own for _, p, own in held() if not _shares_memory(own, p)],
        union=_union,
        rank=dist.get_world_size() - 1,
        steps_done=None if host is None else lambda: getattr(host.get_args(), "curr_iteration", 0),
        samples_done=_samples_done,
        keep=keep,
        say=_say,
    )
    # of an earlier watch: Megatron builds a second chain for some optimizers
    STEP.remove(on=chain)
    for part in chain.chained_optimizers:
        if getattr(part, KEY, None) is not None:
            part.coat_watch.close()
        for patch in (SAVE, SAVE_SHARDED, LOAD):
            patch.remove(on=part)
        part.coat_watch = watch
    STEP.apply(functools.partial(_stepping, watch), on=chain)
    first = chain.chained_optimizers[0]
    for patch in (SAVE, SAVE_SHARDED):
        patch.apply(functools.partial(_saving, watch), on=first)
    LOAD.apply(functools.partial(_loading, watch), on=first)
    return watch


def _stepping(watch: Watch, step: Callable) -> Callable:
    @functools.wraps(step)
    def coat_step(*args, **kwargs):
        result = step(*args, **kwargs)
        watch.end_step()
        return result

    return coat_step


def _saving(watch: Watch, save: Callable) -> Callable:
    @functools.wraps(save)
    def coat_state_dict(*args, **kwargs):
        watch.take_in()
        packed = save(*args, **kwargs)
        fallen = watch.fallback.state()
        return {**packed, KEY: fallen} if any(fallen.values()) else packed

    return coat_state_dict


def _loading(watch: Watch, load: Callable) -> Callable:
    @functools.wraps(load)
    def coat_load_state_dict(state_dict):
        watch.resume(state_dict.get(KEY, {}))
        result = load(state_dict)
        watch.go_on_from(_steps_taken(watch.optimizers))
        return result

    return coat_load_state_dict


def _steps_taken(optimizers: Iterable[CoatAdamW]) -> int:
    """The largest number of steps of an optimizer on any rank: some ranks may hold no state."""
    states = itertools.chain.from_iterable(optimizer.state.values() for optimizer in optimizers)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, max((int(state["step"]) for state in states), default=0))
    return max(found)


def _shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _chunks_of_chain(chain: ChainedOptimizer) -> list[torch.nn.Module]:
    return list(dict.fromkeys(itertools.chain.from_iterable(map(_chunks_of, chain.chained_optimizers))))


def _chunks_of(part: MegatronOptimizer) -> Iterator[torch.nn.Module]:
    for inner in getattr(part, "chained_optimizers", ()):
        yield from _chunks_of(inner)
    yield from getattr(part, "coat_chunks", ())


def _union(names: list[str]) -> list[str]:
    """The names of all ranks, in the same order on each."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, names)
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def _writers() -> list[Callable]:
    """Functions that pass readings to Megatron-LM's writers, on all ranks if its arguments name any: the last
    rank has the writers."""
    host = options.megatron_lm()
    if host is None:
        return []
    args = host.get_args()
    if not (getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None)):
        return []
    return [writer(host.get_tensorboard_writer(), host.get_wandb_writer())]


def _samples_done() -> int:
    host = options.megatron_lm()
    # Megatron-LM counts them after the step
    return 0 if host is None else host.get_args().consumed_train_samples + get_current_global_batch_size()


def _say(line: str, level: int) -> None:
    # Megatron-LM shows warnings by default
    log_single_rank(logger, max(level, logging.WARNING), line)


def check_host(model_chunks: Iterable[torch.nn.Module], config: WatchConfig) -> bool:
    """Whether a model of these chunks is watched. Raises CoatConfigError if it cannot be watched and `config`
    differs from the defaults."""
    sharded = [chunk for chunk in model_chunks if getattr(chunk.ddp_config, "use_megatron_fsdp", False)]
    if sharded and config.every and (config.folder or config.act != "off"):
        key = "folder" if config.folder else "act"
        raise CoatConfigError(
            f"coat.watch.{key}: found {getattr(config, key)!r} with --use-megatron-fsdp, whose parameters "
            'come and go. Set "watch": false, or remove --use-megatron-fsdp.'
        )
    return not sharded


def _building(build: Callable) -> Callable:
    @functools.wraps(build)
    def coat_build(config, model_chunks, *args, **kwargs):
        built = build(config, model_chunks, *args, **kwargs)
        if isinstance(built, MegatronOptimizer) and check_host(model_chunks, options.coat_config().watch):
            built.coat_chunks = list(model_chunks)
        return built

    return coat_build


def _chaining(init: Callable) -> Callable:
    @functools.wraps(init)
    def coat_init(self, chained_optimizers):
        init(self, chained_optimizers)
        _say_left_to_adam(self)
        # a subclass that distributes layers over ranks is a part of another chain
        if type(self) is ChainedOptimizer:
            given = [part.coat_config for part in chained_optimizers if hasattr(part, "coat_config")]
            self.coat_watch = watch_optimizer(self, (given or [options.coat_config()])[0].watch)
            _say_layers(_chunks_of_chain(self))

    return coat_init


def _say_layers(chunks: list[torch.nn.Module]) -> None:
    """Logs one line on the layers of this rank, as DeepSpeed's engines do, if any is COAT's; once per model,
    though Megatron may build several chains for it."""
    layers = layers_of(whole_model(chunks), "Megatron's own")
    if layers.made and not hasattr(chunks[0], SAID):
        setattr(chunks[0], SAID, True)
        _say(f"COAT: {layers.summary()}", logging.INFO)


def _say_left_to_adam(chain: ChainedOptimizer) -> None:
    """Logs a line if Muon, or another optimizer of matrices, does not train the weights of grouped
    experts."""
    inner = [type(getattr(part, "optimizer", part)) for part in chain.chained_optimizers]
    of_matrices = [
        cls.__name__
        for cls in inner
        if any(base.__module__.startswith("emerging_optimizers.") for base in cls.__mro__)
    ]
    modules = itertools.chain.from_iterable(chunk.modules() for chunk in _chunks_of_chain(chain))
    if of_matrices and any(isinstance(module, GroupedLinear) for module in modules):
        _say(
            f"COAT: --moe-grouped-gemm: Megatron gives {of_matrices[0]} matrices alone, and all of a rank's "
            "experts are one parameter of three dimensions: Adam trains them. Remove it to have experts "
            f"one after another, which {of_matrices[0]} trains.",
            logging.WARNING,
        )


def installed() -> bool:
    """Whether Megatron's optimizers are watched."""
    return CHAIN.is_applied()


def install() -> None:
    """From now on watches the models that Megatron's optimizers train, by the block of `optimizer.install`,
    or else of `COAT_CONFIG`. A second call does nothing.

    Raises RuntimeError, before anything is changed, if this Megatron is not as expected.
    """
    if installed():
        return
    for patch in INSTALLED:
        patch.check()
    BUILD.apply(_building)
    CHAIN.apply(_chaining)


def uninstall() -> None:
    """Undoes `install`, after `optimizer.uninstall`. What is watched stays so."""
    for patch in reversed(INSTALLED):
        patch.remove()
