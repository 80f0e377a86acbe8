"""The elements that ZeRO-3 has gathered at each layer: predictions of `coat plan` against DeepSpeed."""

import pytest

from coat_ds.plan import Layout, Sizes, rungs
from coat_ds.plan.gathers import gathers_of
from coat_ds.plan.layout import Limits
from tests.megatron_ext.test_zero3_units import VOCAB, Case, _engine, _gpt, _start, _step
from tests.util import run_distributed

LAYERS = 8
SIZES = Sizes(layers=LAYERS, hidden=64, ffn=128, heads=4, groups=2, head_dim=16, vocabulary=VOCAB)
# a layer has 36,864 elements: about three layers are gathered at a time, as in a model of 13 billion
# parameters
LIMITS = Limits(max_live=115_000, max_reuse=115_000, persistence=100)
# prefetched elements: a layer, part of one, and more than the limit allows
AHEAD = (37_000, 20_000, None)


def gathered() -> list[list[int]]:
    """Gathered elements while each layer runs, forward and then backward, for each of `AHEAD`."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    _start("gloo")
    out = []
    for ahead in AHEAD:
        zero = {
            "stage3_param_persistence_threshold": LIMITS.persistence,
            "stage3_max_live_parameters": LIMITS.max_live,
            "stage3_max_reuse_distance": LIMITS.max_reuse,
        } | ({} if ahead is None else {"stage3_prefetch_bucket_size": ahead})
        case = Case(lambda: _gpt(layers=LAYERS), zero=zero)
        engine, found = _engine(case, 3, None), []
        large = [p for p in engine.module.parameters() if p.ds_numel > LIMITS.persistence]

        def look(large=large, found=found):
            found.append(sum(p.ds_numel for p in large if p.ds_status == ZeroParamStatus.AVAILABLE))

        def behind(module, args, output, look=look):
            look()
            output[0].register_hook(lambda _: look())

        for layer in engine.module.decoder.layers:
            layer.mlp.register_forward_hook(behind)
        # the order is recorded from the second step on
        for step in range(3):
            found.clear()
            _step(engine, case, step)
            engine.step()
        out.append(list(found))
        engine.destroy()
    return out


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(gathered, 2)


@pytest.mark.parametrize("ahead", AHEAD)
def test_weights_are_those_that_deepspeed_has(ranks, ahead):
    layout = Layout(gpus=2, stage=3, sequence=32, limits=LIMITS._replace(prefetch=ahead))
    gathers = gathers_of(SIZES, layout, rungs()["COAT"])
    planned = [module.runs.weights for _, module in (*gathers.forward, *gathers.backward)]
    assert all(rank[AHEAD.index(ahead)] == planned for rank in ranks)
    assert max(planned) > 2 * 36_864
