"""CUDA graphs that may hold collectives of a process group end before the group. That NCCL then does not hang
is tested in `test_parallel_nccl.py`, the end of graphs in `test_graphs.py`."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers its backend)

from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.layers import process_groups
from megatron_ext.model import ModelShape, build_gpt
from tests.megatron_ext.ranks import join
from tests.util import run_distributed

S, VOCAB = 32, 64


def _applied_by_a_model(tensor_parallel):
    """Whether torch's functions are patched before and after a model is built."""
    join(tensor_parallel)
    found = [end.is_applied() for end in process_groups.ENDS]
    build_gpt(ModelShape(1, 64, 96, 4, 2), coat_layer_spec, seq_length=S, vocab_size=VOCAB)
    return found + [end.is_applied() for end in process_groups.ENDS]


@pytest.mark.parametrize("size", [1, 2])
def test_end_graphs_first_is_applied_by_tensor_parallel_layers(size):
    for found in run_distributed(_applied_by_a_model, 2, size):
        assert found == [False, False, size == 2, size == 2]


def _what_ends_graphs(backend):
    ends, found = [], {}
    process_groups.end_graphs = lambda: ends.append(1)
    process_groups.end_graphs_first()
    process_groups.end_graphs_first()
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    for name, kind in {"another": backend, "gloo": "gloo"}.items():
        group = dist.new_group([0], backend=kind)
        dist.destroy_process_group(group)
        found[name] = len(ends)
        ends.clear()
        with pytest.raises(ValueError, match="process group|Process group"):
            dist.destroy_process_group(group)
        ends.clear()
    dist.destroy_process_group(dist.GroupMember.NON_GROUP_MEMBER)
    found["not a member"] = len(ends)
    dist.distributed_c10d.destroy_process_group()
    found["all"] = len(ends)
    with pytest.raises(AssertionError, match="cannot be None"):
        dist.destroy_process_group()
    return found | {"after all": len(ends) - found["all"]}


@pytest.mark.parametrize("backend", ["fake", "gloo"])
def test_end_graphs_first_ends_graphs_before_groups_of_gpus(backend):
    """torch's fake backend replaces NCCL, which CPUs do not have."""
    (found,) = run_distributed(_what_ends_graphs, 1, backend)
    another = int(backend == "fake")
    assert found == {"another": another, "gloo": 0, "not a member": 0, "all": 1, "after all": 0}
