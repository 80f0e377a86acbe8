"""The one error metric, from `tests.kernels.agreement`, and a way to run a function in several processes."""

import collections
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coat_kernels.groups import GroupFormat
from tests.hosts import repair_old_deepspeed
from tests.kernels.agreement import rel_rms  # noqa: F401

# a format of saved activations that stores FP32 values, for references on a CPU
EXACT = GroupFormat(
    "exact",
    lambda groups: (groups, torch.full(groups.shape[:2], 127, dtype=torch.uint8)),
    lambda codes: codes,
    None,
    None,
)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    """Sets torch's default floating-point dtype within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Made(TorchDispatchMode):
    """Records the tensors that operations make within the context: new memory that none of their arguments
    has. Operations inside of a Moment's operations are recorded too."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[int, torch.dtype]] = []

    def over(self, most: int) -> dict[torch.dtype, int]:
        """The number of tensors with more elements than this, by dtype."""
        return dict(collections.Counter(dtype for numel, dtype in self.made if numel > most))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        plain = (torch.Tensor, torch.nn.Parameter)
        if not all(kind in plain for kind in types):
            # the tensor's own type handles the operation, and its inner operations return here
            return NotImplemented
        kwargs = kwargs or {}

        def tensors(tree):
            return [t for t in tree_leaves(tree) if type(t) in plain and t.device.type != "meta"]

        had = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        found = func(*args, **kwargs)
        for t in tensors(found):
            if t.untyped_storage()._cdata not in had:
                self.made.append((t.untyped_storage().nbytes() // t.element_size(), t.dtype))
        return found


# With this variable ranks of GPU tests share one GPU. NCCL refuses two ranks on a GPU, so gloo carries the
# messages of tests that take `backend`. Such a run tests kernels and messages, and neither NCCL nor speed.
SHARED_GPU = bool(os.environ.get("COAT_TEST_SHARED_GPU"))


def on_gpus(count: int):
    """Marks a test that needs this number of GPUs."""
    count = 1 if SHARED_GPU else count
    few = pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")
    return lambda test: pytest.mark.gpu(few(test))


def backend(device: str) -> str:
    """The backend of torch.distributed for ranks on "cpu" or "cuda"."""
    return "gloo" if device == "cpu" or SHARED_GPU else "nccl"


@contextlib.contextmanager
def saved_tensors():
    """A list of the tensors that autograd saves within the context. They stay alive, so that no address is
    used twice."""
    tensors: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
        yield tensors


def free_port() -> int:
    """A TCP port of this machine that no other process gets before it is used.

    It lies below the range from which systems take ports for connections (Linux: from 32768). The generator
    is the system's, since tests seed the others.
    """
    while True:
        port = random.SystemRandom().randrange(16384, 32768)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


# for gc.set_threshold: without a GPU, usual garbage collections took up to a tenth of a test's time
RARELY = (100_000, 50, 100)
# seconds until a rank that still runs prints its stack and ends, for example one that waits for another rank
# forever
PATIENCE = 400
# without a GPU, ranks are forked from a server that has imported these modules
PRELOADED = ["tests.preloaded", "tests.util"]


def meeting_place() -> tuple[dist.TCPStore, dict[str, str]]:
    """A store in this process, for as long as it is referenced, and the environment through which ranks find
    it.

    torchrun does the same. Another process could take a port chosen for rank 0 before rank 0 opens it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _worker(rank, fn, world_size, folder, gpus, environment, args):
    # a forked rank starts with the server's environment
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(0 if SHARED_GPU else rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    if gpus:
        # Megatron makes dozens of groups for each model of a test, and each group has buffers for every
        # channel
        os.environ.setdefault("NCCL_MAX_NCHANNELS", "2")
        torch.cuda.set_device(0 if SHARED_GPU else rank)
    else:
        # Megatron uses Transformer Engine's norms if it is installed, and they need a GPU
        sys.modules["transformer_engine"] = None
    repair_old_deepspeed()
    try:
        result = fn(*args)
    except BaseException:
        # the parent shows one rank's error only: print each error in its rank, and fail
        traceback.print_exc()
        if gpus:
            # the end of a process waits for NCCL, which may wait for a rank that still runs
            sys.stderr.flush()
            os._exit(1)
        raise
    torch.save(result, os.path.join(folder, f"{rank}.pt"))
    # a process that ends while threads of its group run can abort
    if dist.is_initialized():
        dist.destroy_process_group()


def run_distributed(fn, world_size: int, *args, gpus: bool = False, fresh: bool = False) -> list:
    """Calls `fn(*args)` in `world_size` processes with torchrun's environment; the results by rank.

    `fn` must be importable (a module-level function) and initialises its own process group, which ends with
    the process. The processes see no GPU, so that they are ranks on a CPU everywhere; with `gpus`, each has a
    GPU of its own. They are forked from a server that has imported the frameworks, but with `gpus` or
    `fresh`: then they import everything themselves, in the order that `fn` does it in.
    """
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, hidden):
        _store, address = meeting_place()
        args = (fn, world_size, folder, gpus, {**os.environ, **address}, args)
        method = "spawn" if gpus or fresh else "forkserver"
        mp.start_processes(_worker, args, nprocs=world_size, start_method=method)
        return [torch.load(os.path.join(folder, f"{r}.pt"), weights_only=False) for r in range(world_size)]


@contextlib.contextmanager
def listening(level=logging.INFO, *words):
    """The lines of COAT's log from `level` on, those with one of `words` if some are given."""
    lines, handler = [], logging.Handler(level)

    def emit(record):
        line = record.getMessage()
        if not words or any(word in line for word in words):
            lines.append(line)

    handler.emit = emit
    logging.getLogger("coat_ds").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("coat_ds").removeHandler(handler)
