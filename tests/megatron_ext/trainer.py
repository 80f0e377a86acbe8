"""A tiny GPT, Megatron's data parallel wrapper and one of its optimizers, on a CPU."""

import contextlib
import os

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from coat_ds.config import CoatConfig
from megatron_ext import cpu, layer_specs
from megatron_ext.model import ModelShape, build_gpt
from megatron_ext.optimizer import patches
from tests.megatron_ext.layers import loss_of

S, B, VOCAB = 16, 2, 128
H, FFN, HEADS, LAYERS = 64, 96, 4, 2
# arguments of Megatron's OptimizerConfig
MODES = {
    "distributed": {"use_distributed_optimizer": True},
    "precision_aware": {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True},
    "plain": {},
}


@contextlib.contextmanager
def installed(**block):
    """Within the context Megatron's adam is CoatAdamW, by this block, and optimizers are built on a CPU."""
    patches.uninstall()
    patches.install(CoatConfig.from_dict({"enabled": True, **block}))
    try:
        with cpu.no_cuda():
            yield
    finally:
        patches.uninstall()


class Trainer:
    """A tiny GPT, Megatron's data parallel wrapper and one of its optimizers, on a CPU.

    layers: "sdpa" or "coat". frozen: a part of the names of parameters that are not trained. config: of
    Megatron's TransformerConfig.
    """

    def __init__(self, mode, layers="sdpa", frozen=None, **config):
        shape = ModelShape(LAYERS, H, FFN, HEADS, HEADS)
        spec = getattr(layer_specs, f"{layers}_layer_spec")
        model = build_gpt(shape, spec, seq_length=S, vocab_size=VOCAB, **config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen is None or frozen not in name)
        distributed = MODES[mode].get("use_distributed_optimizer", False)
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
        )
        self.model = DistributedDataParallel(model.config, settings, model)
        options = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, "bf16": True}
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**{**options, **MODES[mode]}), [self.model])

    def steps(self, *numbers):
        """The losses of steps on tokens with these numbers, for this data-parallel rank."""
        losses = []
        for number in numbers:
            tokens = self.tokens(number, parallel_state.get_data_parallel_rank())
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            loss = loss_of(self.model, tokens)
            loss.backward()
            self.model.finish_grad_sync()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    @staticmethod
    def tokens(number, rank):
        generator = torch.Generator().manual_seed(10 * number + rank)
        return torch.randint(0, VOCAB, (B, S), generator=generator)

    def _sharded(self, sharding, is_loading=False):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {"distrib_optim_sharding_type": sharding, "dp_cp_group": group}
        model = self.model.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(dict(model), is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder, sharding):
        if dist.get_rank() == 0:
            os.makedirs(folder)
        dist.barrier()
        dist_checkpointing.save(self._sharded(sharding), folder)

    def load(self, folder, sharding):
        loaded = dist_checkpointing.load(self._sharded(sharding, is_loading=True), folder)
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        return self

    @property
    def inner(self):
        """The wrapped AdamW."""
        return self.optimizer.optimizer

    def tensors(self):
        """The tensors that a step reads and writes on this rank: weights, masters and decoded moments."""
        inner = self.inner
        held = [p for group in inner.param_groups for p in group["params"]]
        states = [value for p in held for _, value in sorted(inner.state[p].items())]
        decoded = [value.decode() if hasattr(value, "decode") else value.clone() for value in states]
        return [p.detach().clone() for p in (*self.model.parameters(), *held)] + decoded


# layouts of states in Megatron's checkpoints; a plain optimizer has one layout
SHARDINGS = {
    "distributed": ("dp_reshardable", "fully_reshardable"),
    "precision_aware": ("dp_reshardable", "fully_reshardable"),
    "plain": ("fully_reshardable",),
}


def plain_states(folder):
    """Optimizer states of a checkpoint as whole tensors, by name."""
    tensors = dist_checkpointing.load_plain_tensors(folder)
    return {key: value for key, value in tensors.items() if key.startswith("optimizer.")}
