"""DeepSpeed's sequence parallelism (Ulysses, ALST), which takes the place of transformers' attention."""

from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

import coat_ds
from tests.families import FAMILIES
from tests.util import rel_rms, run_distributed

LLAMA, LENGTH = FAMILIES["llama"], 32


def whole():
    return torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 97


def share(order):
    """This rank's part of the logits, and of the gradient of the first layer's values."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo")
    model = LLAMA.build()
    if order == "converted first":
        coat_ds.convert(model)
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=model.config._attn_implementation,
        sequence_parallel_size=2,
        micro_batch_size=2,
    )
    coat_ds.convert(model)
    rank, positions = torch.distributed.get_rank(), torch.arange(LENGTH).expand(2, -1)
    ids, positions = (x.chunk(2, 1)[rank] for x in (whole(), positions))
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    logits.square().sum().backward()
    return logits.detach(), model.model.layers[0].self_attn.v_proj.weight.grad


@pytest.mark.parametrize("order", ["registered first", "converted first"])
def test_ulysses_ranks_attend_to_each_other(order):
    if order == "converted first" and Version(version("deepspeed")) < Version("0.19"):
        pytest.skip("DeepSpeed before 0.19 takes no name of attention but its own list's")
    parts = run_distributed(share, 2, order)
    model = LLAMA.build()
    expected = model(input_ids=whole(), use_cache=False).logits
    expected.square().sum().backward()
    logits, gradients = zip(*parts, strict=True)
    # FP8; a rank that attends to itself alone is off by 0.5 and more
    assert rel_rms(torch.cat(logits, 1), expected) < 0.08
    assert rel_rms(sum(gradients), model.model.layers[0].self_attn.v_proj.weight.grad) < 0.15
