"""One process, Megatron's groups of size 1, and a tiny model for every test of this folder."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from tests.hosts import write_checkpoints_in_threads


@contextlib.contextmanager
def one_megatron_process():
    """Initializes Megatron so that models can be built, on the GPU if there is one, else on the CPU."""
    from megatron.core import parallel_state

    from megatron_ext import cpu
    from megatron_ext.model import initialize_model_parallel

    cpu.enable()
    write_checkpoints_in_threads()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # tests of another folder may have left a group of one process, or Megatron's groups without it
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.destroy_model_parallel()
    initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        cpu.disable()


@pytest.fixture(scope="package")
def megatron():
    """As `one_megatron_process`."""
    with one_megatron_process():
        yield
