"""One process with Megatron's groups, for the layers that the benchmarks measure."""

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.fixture(scope="package")
def megatron():
    from benchmarks.common.spawn import one_process

    with one_process(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        yield
