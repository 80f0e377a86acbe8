"""A hybrid stack with the weights of a GPT."""

import copy

import torch

from megatron_ext.hybrid_specs import coat_hybrid_stack_spec

S, B, VOCAB = 32, 2, 64
EXPERTS = {
    "num_moe_experts": 2,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "moe_token_dispatcher_type": "allgather",
}


def hybrid_of(pattern, gpt, spec=coat_hybrid_stack_spec):
    """A hybrid model with the config of `gpt`."""
    config = copy.copy(gpt.config)
    config.num_layers = len(pattern)
    torch.manual_seed(1)
    arguments = (config, spec, VOCAB, S)
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:
        from megatron.core.models.mamba import MambaModel

        model = MambaModel(*arguments, hybrid_override_pattern=pattern, position_embedding_type="rope")
    else:
        model = HybridModel(*arguments, hybrid_layer_pattern=pattern, position_embedding_type="rope")
    return model.to(next(gpt.parameters()))
