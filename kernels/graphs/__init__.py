"""Layers replayed as CUDA graphs, one of the forward and one of the backward, recorded where a model calls
them.

A replay costs the CPU a few launches, however many kernels there are. It costs the GPU copies: inputs and
results pass through buffers whose addresses the graphs know. What a forward saves for its backward stays
allocated, as much as a step takes at its peak anyway. The rest of its memory is shared with other graphs.

A graph reads and writes fixed addresses. It is replayed only while all of them are those that were recorded,
and while the replay overwrites nothing that still waits for a backward. Otherwise the function runs eagerly,
or is recorded again. Constants that a model makes anew for each forward, such as tables of angles and masks,
are copied to fixed addresses once for all layers that read them.

A graph may hold collectives. It has to end before their process group, for which `end_graphs` is there.

    memory.py      pools, buffers that graphs share, and copies of constants
    recording.py   both graphs of a function, and the node of autograd that replays them
    patience.py    how long calls are launched before graphs are recorded
    evaluation.py  forwards that no backward follows
    calls.py       calls of a function, which are launched, recorded or replayed
"""

import torch

from coat_kernels.graphs.calls import MOST_MOVES, MOST_SHAPES, Graphs, Place
from coat_kernels.graphs.memory import Constant, end_graphs
from coat_kernels.graphs.patience import PAID_OFF, WARM_UP
from coat_kernels.graphs.recording import Recording

# on a parameter: what `gradient_leaves` says of it, where whoever trains it knows
LEAVES = "coat_gradient_leaves"


def gradient_leaves(parameter: torch.Tensor) -> bool:
    """Whether its gradient leaves it during backward, for memory that is there all the time, as in ZeRO-2 and
    in Megatron's data parallelism. Otherwise gradients pile up beside what graphs hold."""
    return getattr(parameter, LEAVES, False) or getattr(parameter, "main_grad", None) is not None


def graphed_work(tensor_parallel: int = 1, gradients_leave: bool = False) -> float:
    """Tokens times parameters of a rank's layer up to which "auto" records it.

    CPUs beside H200s needed 3.5 to 7 ms to launch a layer's forward and backward. Up to about 8e11 the GPU
    needs less: a step of replays took 0.74 to 0.79 of the launches' time with 4.1e11, and 0.97 to 1.00 with
    8.3e11. Graphs hold what is saved for backward. With 4.1e11 that was 1 % more memory where gradients leave
    their parameters (`gradient_leaves`), but 11 % where not, as in ZeRO-1 (benchmarks/results,
    train_7b_1gpu_graphs.csv, train_7b_4gpu_graphs.csv). Over tensor parallelism, where the CPU launches
    messages as well, 0.49 and 0.86 of the time were worth a fifth and a quarter (train_7b_4gpu_tp4.csv).
    """
    return 8e11 if tensor_parallel > 1 or gradients_leave else 4e11


__all__ = [
    "LEAVES",
    "MOST_MOVES",
    "MOST_SHAPES",
    "PAID_OFF",
    "WARM_UP",
    "Constant",
    "Graphs",
    "Place",
    "Recording",
    "end_graphs",
    "gradient_leaves",
    "graphed_work",
]
