"""Layers as CUDA graphs: one graph of the forward and one of the backward, recorded at a call of the layer.

It may import `autograd` and `libraries` of `coat_kernels`. Start at calls.py.

A replay costs the CPU a few launches, for any number of kernels. It costs the GPU copies: inputs and results
pass through buffers at addresses that the graphs contain. Tensors that a forward saves for its backward stay
allocated; an eager step needs the same memory at its peak. Graphs share the rest of their memory.

A graph reads and writes fixed addresses. It is replayed only while all of them are the recorded ones, and
while the replay overwrites nothing that a pending backward still needs. Otherwise the function runs eagerly,
or is recorded again. Constants that a model recreates in each forward, such as tables of angles and masks,
are copied to fixed addresses once for all layers that read them.

A graph may contain collectives. It must end before their process group ends; call `end_graphs` first.

    memory.py      pools, buffers that graphs share, and copies of constants
    recording.py   both graphs of a function, and the autograd node that replays them
    warm_up.py     number of eager calls before graphs are recorded
    evaluation.py  forwards without a backward
    verify.py      the check of a first replay against the eager gradients
    calls.py       calls of a function: eager, recorded or replayed
"""

import torch

from coat_kernels.graphs.calls import Graphs
from coat_kernels.graphs.memory import end_graphs

# a parameter's attribute with the value of `gradient_moves_in_backward`, set by the adapter of a framework
MOVES_IN_BACKWARD = "coat_gradient_moves"


def gradient_moves_in_backward(parameter: torch.Tensor) -> bool:
    """Whether the parameter's gradient moves during backward into memory that is always allocated, as in
    ZeRO-2 and in Megatron's data parallelism. Otherwise gradients accumulate in addition to the memory of
    graphs."""
    return getattr(parameter, MOVES_IN_BACKWARD, False) or getattr(parameter, "main_grad", None) is not None


def max_graphed_work(tensor_parallel: int = 1, gradients_move: bool = False) -> float:
    """The largest work, in tokens times parameters of a rank's layer, that "auto" records.

    The CPUs of H200 machines needed 3.5 to 7 ms to launch a layer's forward and backward. Up to a work of
    about 8e11 the GPU needs less than the CPU: a step with replays took 0.74 to 0.79 of the eager time at
    4.1e11, and 0.97 to 1.00 at 8.3e11. Graphs hold the tensors saved for backward. At 4.1e11 this took 1 %
    more memory if gradients move (`gradient_moves_in_backward`), but 11 % if not, as in ZeRO-1
    (benchmarks/results, train_7b_1gpu_graphs.csv, train_7b_4gpu_graphs.csv). With tensor parallelism the CPU
    also launches collectives; steps took 0.49 and 0.86 of the eager time, for a fifth and a quarter more
    memory (train_7b_4gpu_tp4.csv).
    """
    return 8e11 if tensor_parallel > 1 or gradients_move else 4e11


__all__ = ["MOVES_IN_BACKWARD", "Graphs", "end_graphs", "gradient_moves_in_backward", "max_graphed_work"]
