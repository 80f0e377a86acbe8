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

from coat_kernels.graphs.calls import MOST_MOVES, MOST_SHAPES, Graphs, Place
from coat_kernels.graphs.memory import Constant, end_graphs
from coat_kernels.graphs.patience import PAID_OFF, WARM_UP
from coat_kernels.graphs.recording import Recording


def graphed_work(tensor_parallel: int = 1) -> float:
    """Tokens times parameters of a rank's layer up to which "auto" records it.

    On one H200 such a layer takes the 3.5 ms that the CPU needs to launch its forward and backward. Larger
    ones gain nothing from graphs, which hold what is saved for backward. Over tensor parallelism the CPU has
    messages to launch as well, and ranks wait for the slowest: 11 ms on four H200s. There a step of replays
    took 0.49 of the launches' time with 4.1e11, and 0.86 with 8.3e11, for a fifth and a quarter more memory
    (benchmarks/results/train_7b_4gpu_tp4.csv).
    """
    return 4e11 if tensor_parallel == 1 else 8e11


__all__ = [
    "MOST_MOVES",
    "MOST_SHAPES",
    "PAID_OFF",
    "WARM_UP",
    "Constant",
    "Graphs",
    "Place",
    "Recording",
    "end_graphs",
    "graphed_work",
]
