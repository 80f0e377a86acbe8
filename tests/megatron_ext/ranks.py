"""Processes of `run_distributed` as ranks of Megatron."""

import torch
import torch.distributed as dist

from megatron_ext import cpu
from megatron_ext.model import initialize_model_parallel
from tests.util import backend


def join(tensor_model_parallel_size: int = 1, **sizes) -> torch.device:
    """Makes this process a rank, on a GPU of its own or on the CPU, and returns its device. `sizes`: of
    Megatron's groups. Call it again after `parallel_state.destroy_model_parallel()` for other sizes."""
    cpu.enable()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        dist.init_process_group(backend(device.type))
    initialize_model_parallel(tensor_model_parallel_size, **sizes)
    return device
