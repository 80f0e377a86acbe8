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

# Tokens times parameters of a layer whose forward and backward take an H200 the 3.5 ms that its CPU needs for
# the launches. Larger layers gain nothing from graphs, which hold what is saved for backward.
GRAPHED_WORK = 4e11

__all__ = [
    "GRAPHED_WORK",
    "MOST_MOVES",
    "MOST_SHAPES",
    "PAID_OFF",
    "WARM_UP",
    "Constant",
    "Graphs",
    "Place",
    "Recording",
    "end_graphs",
]
