"""Layers that are replayed as CUDA graphs take turns in being watched. So is each chunk of a pipeline."""

import pytest
import torch

import coat_ds
from coat_ds.watch import Watch, codes
from tests.coat_ds.watch.parts import model, with_graphs


def sums_of_steps(watch, steps, closes=True):
    """Sums by layer, of watched layers. The CPU's layers report themselves though they count as
    replayed."""
    sums = []
    for i in range(steps):
        x = torch.randn(16, 64).mul(64.0 ** torch.randn(16, 64) * 4**i)
        watch.model(x.bfloat16()).sum().backward()
        watch.end_step()
        if (pending := watch._pending) is not None:
            sums.append(dict(zip(pending.layers, pending.codes.tolist(), strict=True)))
    watch.close() if closes else watch.take_in()
    return sums


@pytest.fixture
def blocks():
    made = coat_ds.convert(torch.nn.ModuleList([model(), model()]).bfloat16())
    made.forward = lambda x: made[1](made[0](x))
    with_graphs(made)
    return made


@pytest.mark.parametrize("every", [1, 2])
def test_figures_of_a_replayed_layer_are_those_of_its_last_turn(blocks, every):
    readings = []
    watch = Watch(blocks, None, {"every": every}, [readings.append])
    sums = sums_of_steps(watch, 3 * every)
    assert len(readings) == len(sums) == 3
    for i, reading in enumerate(readings):
        # reading number i + 1
        mine, other = "10" if i % 2 == 0 else "01"
        turns = [(sums[i], f"{mine}."), (sums[i - 1 if i else 0], f"{other}.")]
        rows = [row for found, block in turns for name, row in found.items() if name.startswith(block)]
        assert [row[codes.REPLAYED] for row in rows[:2]] == [0, 0] and len(rows) == 4
        assert reading.groups["*.*"] == codes.figures([sum(x) for x in zip(*rows, strict=True)])


def test_layers_above_a_limit_are_watched_out_of_turn(blocks):
    watch = Watch(blocks, None, {"every": 1, "act": "warn", "flushed": 1e-9})
    sums = sums_of_steps(watch, 3)
    replayed = [sorted(name for name, row in found.items() if row[codes.REPLAYED]) for found in sums]
    # the first reading is read after the second
    assert replayed == [["0", "0.0", "0.1"], ["1", "1.0", "1.1"], []]


def test_chunks_of_a_pipeline_are_watched_in_their_own_first_forwards():
    halves = [coat_ds.convert(torch.nn.ModuleList([model(), model()]).bfloat16()) for _ in range(2)]
    for half in halves:
        half.forward = lambda x, half=half: half[1](half[0](x))
    whole, readings = torch.nn.Module(), []
    whole.first, whole.second = halves
    watch = Watch(whole, None, {"every": 1}, [readings.append], forwards=halves)
    x = torch.randn(16, 64).bfloat16()
    for number in range(5):
        if number == 1:
            for half in halves:
                with_graphs(half)
        # micro-batch by micro-batch in each chunk, as they are interleaved
        ys = [halves[0](x) for _ in range(2)]
        for y in ys:
            halves[1](y).sum().backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        watch.end_step()
        rows = dict(zip(watch._pending.layers, watch._pending.codes.tolist(), strict=True))
        names = "first.0", "first.1", "second.0", "second.1"
        seen = [name for name in names if not rows[name][codes.REPLAYED]]
        assert len(seen) == (1 if number else 4), "each has its turn"
    watch.close()
    # all blocks are alike, so that a block that was replayed counts as it is
    assert len({reading.memory["saved"] for reading in readings}) == 1
    assert readings[0].memory["saved"] > 0


def test_a_forward_that_fails_is_watched_when_it_is_tried_again(blocks):
    readings, forward = [], blocks.forward
    watch = Watch(blocks, None, {"every": 1}, [readings.append])

    def fails(x):
        blocks[0](x)
        raise RuntimeError("on purpose")

    for number in range(4):
        blocks.forward = fails
        if number % 2:
            with pytest.raises(RuntimeError, match="on purpose"):
                blocks(torch.ones(16, 64, dtype=torch.bfloat16))
        blocks.forward = forward
        sums_of_steps(watch, 1, closes=False)
    watch.close()
    assert len({reading.memory["saved"] for reading in readings}) == 1
    assert readings[0].memory["saved"] > 0
