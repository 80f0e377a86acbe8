"""Host memory that CUDA has pinned, and how much of it a process may take."""

import contextlib
import mmap
import os
from pathlib import Path

import torch

MEMORY_INFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


class HostMemoryError(RuntimeError):
    """There is too little host memory for the states, or CUDA cannot pin it."""


class Pages(mmap.mmap):
    """Anonymous pages of host memory, which CUDA may have pinned."""

    def __init__(self, *_, **__):
        self.address = torch.frombuffer(self, dtype=torch.uint8, count=1).data_ptr()
        # the process that has pinned them
        self.pinned_by: int | None = None

    def __del__(self):
        # a forked process has no part in CUDA
        if self.pinned_by == os.getpid():
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.address)

    def view(self, begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements from byte `begin` on. The tensor has a storage of its own: files hold whole
        storages."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self, dtype=dtype, count=numel, offset=begin)


def allocate(size: int, device: torch.device) -> Pages:
    """`size` bytes of host memory, pinned if `device` is a GPU.

    torch's own allocator of pinned memory rounds up to a power of two.
    Raises HostMemoryError if there is less host memory, or CUDA does not pin it.
    """
    check_room(size)
    pages = Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if device.type == "cuda":
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        # after a fork, a write would move a page away from where CUDA has pinned it
        pages.madvise(mmap.MADV_DONTFORK)
        if error := int(torch.cuda.cudart().cudaHostRegister(pages.address, len(pages), 0)):
            raise HostMemoryError(
                f"CoatAdamW: offload: CUDA did not pin {size:,} bytes of host memory (cudaHostRegister: "
                f"error {error}). Free host memory, or keep the states on the GPU."
            )
        pages.pinned_by = os.getpid()
    return pages


def check_room(size: int) -> None:
    """Raises HostMemoryError if host memory has no room for `size` bytes in each process of this job."""
    # torchrun's name, and that of DeepSpeed's launcher
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    total, available = host_memory()
    # other ranks may have allocated their part already: what is available is compared with this rank's part
    if size * ranks > total or size > available:
        raise HostMemoryError(
            f"CoatAdamW: offload: states of {size:,} bytes in each of {ranks} processes of this host need "
            f"{size * ranks:,} bytes; found {total:,} bytes of host memory, {available:,} of them available. "
            "Use more hosts, or keep the states on the GPU."
        )


def host_memory() -> tuple[int, int]:
    """Bytes of memory that this process may use, and that are available now; limits of its cgroup count."""
    lines = (line.split() for line in MEMORY_INFO.read_text().splitlines())
    info = {words[0]: 1024 * int(words[1]) for words in lines}
    total, available = info["MemTotal:"], info["MemAvailable:"]
    if (limit := CGROUP / "memory.max").exists() and (most := limit.read_text().strip()).isdigit():
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # cached files give way
        used = int((CGROUP / "memory.current").read_text()) - int(stat["file"]) + int(stat["shmem"])
        total, available = min(total, int(most)), min(available, int(most) - used)
    return total, available
