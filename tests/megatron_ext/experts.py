"""A tiny GPT whose second layer has routed experts, and its training."""

import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.model import ModelShape, build_gpt
from tests.megatron_ext.layers import loss_of

S, B, VOCAB, H, RANKS = 32, 2, 64, 64, 2
SHAPE = ModelShape(2, H, 96, 4, 2)
# the first layer is dense, the second has routed experts and a shared one
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "moe_layer_freq": [0, 1],
    "moe_token_dispatcher_type": "allgather",
}
# two experts, and each token takes one
EACH_ONE = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
# Megatron's fused GELU takes no weights of the router, and its shared experts have no biases
GPT = {
    "normalization": "LayerNorm",
    "activation_func": F.gelu,
    "gated_linear_unit": False,
    "bias_activation_fusion": False,
    "add_bias_linear": True,
    "moe_shared_expert_intermediate_size": None,
}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
# experts drop tokens above their capacity
DROPPING = ALL_TO_ALL | {"moe_expert_capacity_factor": 0.75}
# and are padded with tokens of weight zero below it
PADDED = DROPPING | {"moe_pad_expert_input_to_capacity": True}


def build_mixture(spec, **config):
    return build_gpt(SHAPE, spec, seq_length=S, vocab_size=VOCAB, **(EXPERTS | config))


def train(model, tokens):
    """The losses of eight steps under Megatron's data parallelism."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, average_in_collective=True)
    ddp, losses = DistributedDataParallel(model.config, settings, model), []
    for _ in range(8):
        ddp.zero_grad_buffer()
        loss = loss_of(ddp, tokens)
        loss.backward()
        ddp.finish_grad_sync()
        losses.append(loss.item())
        for p in model.parameters():
            p.data.sub_(0.5 * p.main_grad)
    return losses


GROUPED = {"moe_grouped_gemm": True}


def grouped_mixture(**config):
    """A model with grouped experts, and the experts of its second layer."""
    model = build_mixture(coat_layer_spec, **(GROUPED | config))
    return model, model.decoder.layers[1].mlp.experts


# backward repeats the messages between ranks
RECOMPUTED = ALL_TO_ALL | {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
