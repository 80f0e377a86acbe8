"""Small models, and layers that seem to be recorded."""

import torch

import coat_ds
from coat_kernels.graphs import Graphs
from coat_kernels.graphs.calls import ShapeGraphs

VOCABULARY = 64


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def linear():
    torch.manual_seed(0)
    return coat_ds.convert(torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).bfloat16())


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **sizes)
    return LlamaForCausalLM(config).bfloat16()


def with_graphs(layers):
    """Has layers seem to be recorded. On a CPU they run in Python all the same."""
    for layer in layers:
        layer.graphs = Graphs()
        layer.graphs._by_shape["a shape"] = ShapeGraphs("addresses")
        layer.graphs._by_shape["a shape"].recordings.append("a recording")
