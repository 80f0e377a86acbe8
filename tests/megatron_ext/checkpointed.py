"""Megatron's distributed checkpoints of a tiny GPT."""

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

from megatron_ext.layer_specs import sdpa_layer_spec
from megatron_ext.model import ModelShape, build_gpt


def build_gpt_of(spec, config, seed, **more):
    shape = ModelShape(2, 64, 96, 4, 2)
    return build_gpt(shape, spec, seq_length=16, vocab_size=64, seed=seed, **config, **more)


def stock_gpt(config, seed):
    """Megatron's own model, with the layers that it builds without --spec."""
    if "num_moe_experts" in config:
        # the config decides which layers have experts
        some = build_gpt_of(sdpa_layer_spec, config, seed).config
        spec = get_gpt_decoder_block_spec(some, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.get("qk_layernorm", False),
            normalization=config.get("normalization", "RMSNorm"),
        )
    return build_gpt_of(spec, config, seed)


def shake(model):
    """Gives every weight its own values: norms, which begin with ones, and the experts of each rank."""
    of_weights = parallel_state.get_tensor_model_parallel_rank()
    of_experts = parallel_state.get_expert_model_parallel_rank()
    for number, parameter in enumerate(model.parameters()):
        rank = of_weights if getattr(parameter, "tensor_model_parallel", False) else 0
        if not getattr(parameter, "allreduce", True):
            rank = of_experts
        generator = torch.Generator().manual_seed(2 * number + rank)
        parameter.data.add_(torch.rand(parameter.shape, generator=generator))


def sharded(model, alone=False):
    """alone: whether each rank writes its own shard (`singleton_local_shards`)."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group, "singleton_local_shards": alone})


def save(model, folder, alone=False):
    folder.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(sharded(model, alone), str(folder))


def load(model, folder, alone=False):
    model.load_state_dict(dist_checkpointing.load(sharded(model, alone), str(folder)))
