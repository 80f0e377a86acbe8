"""A small model, and layers that seem to be recorded."""

import torch

from coat_kernels.graphs import Graphs, Place


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def with_graphs(layers):
    """Has layers seem to be recorded. On a CPU they run in Python all the same."""
    for layer in layers:
        layer.graphs = Graphs()
        layer.graphs._places["a shape"] = Place("addresses")
        layer.graphs._places["a shape"].recordings.append("a recording")
