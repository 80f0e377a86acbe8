"""Layers that are replayed as CUDA graphs take turns in being watched. So is each chunk of a pipeline."""

import pytest
import torch

import coat_ds
from coat_ds.watch import Watch, codes
from tests.coat_ds.watch.parts import model, with_graphs


def sums_of_steps(watch, steps, closes=True):
    """By layer, of those that are watched. The CPU's layers tell of themselves though they count as
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
    # the first reading is taken in behind the second
    assert replayed == [["0", "0.0", "0.1"], ["1", "1.0", "1.1"], []]


def test_layers_that_have_fallen_back_take_turns_again(blocks):
    """They have no codes that could go below the limit, and none that they told before count any more."""
    readings = []
    config = {"every": 1, "act": "act", "readings": 1, "flushed": 1.0}
    watch = Watch(blocks, None, config, [readings.append])
    sums_of_steps(watch, 1, closes=False)
    assert watch._earlier["1.0"][0] > 0
    watch.fallback.judge(1, {}, {name: {"input_flushed": 1.1} for name in ("1.0", "1.1")})
    assert watch.fallback.suspects == [] and watch.fallback.layers == ["1.0", "1.1"]
    with_graphs([blocks[1]])
    # it is the other block's turn
    (found,) = sums_of_steps(watch, 1)
    assert {name for name, row in found.items() if row[codes.REPLAYED]} == {"1", "1.0", "1.1"}
    expected = (sum(x) for x in zip(found["0.0"], found["0.1"], strict=True))
    assert readings[-1].groups["*.*"] == codes.figures(list(expected))


def test_what_layers_told_before_a_checkpoint_was_loaded_is_forgotten(blocks):
    readings = []
    watch = Watch(blocks, None, {"every": 1}, [readings.append])
    sums_of_steps(watch, 1, closes=False)
    watch.take_in()
    watch.resume({})
    (found,) = sums_of_steps(watch, 1)
    # it is the turn of block 0; of the other the reading has only what this step told
    assert {name for name, row in found.items() if row[codes.REPLAYED]} == {"1", "1.0", "1.1"}
    rows = [found[name] for name in ("0.0", "0.1", "1.0", "1.1")]
    assert readings[-1].groups["*.*"] == codes.figures([sum(x) for x in zip(*rows, strict=True)])


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


def test_a_block_that_was_not_called_was_not_looked_at(blocks):
    said, config = [], {"every": 1, "act": "warn", "readings": 2, "flushed": 1e-9}
    watch = Watch(blocks, None, config, say=lambda line, level: said.append(line))
    (first,) = sums_of_steps(watch, 1, closes=False)
    # the turn of block 1 was the first reading's, and is that of the third
    watch.go_on_from(2)
    blocks.forward = lambda x: blocks[0](x)
    (second,) = sums_of_steps(watch, 1)
    assert second["1.0"][codes.REPLAYED] == 1 and second["1.0"][0] == 0
    assert watch._earlier["1.0"] == first["1.0"] and first["1.0"][0] > 0
    # what it told in the first reading is not counted again
    assert not [line for line in said if ": 1." in line]


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


def test_an_interrupted_forward_leaves_no_hooks(blocks):
    """torch calls no hooks behind what is no Exception."""
    watch = Watch(blocks, None, {"every": 1}, [lambda reading: None])

    def interrupted(x):
        blocks[0](x)
        raise KeyboardInterrupt

    blocks.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        blocks(torch.ones(16, 64, dtype=torch.bfloat16))
    watch.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in blocks.modules())


def test_a_block_of_a_forward_that_failed_was_not_looked_at(blocks):
    """Where the forward that is tried again ends without it."""
    watch = Watch(blocks, None, {"every": 1}, [lambda reading: None])

    def fails(x):
        blocks[1](blocks[0](x))
        raise RuntimeError("on purpose")

    blocks.forward = fails
    with pytest.raises(RuntimeError, match="on purpose"):
        blocks(torch.ones(16, 64, dtype=torch.bfloat16))
    blocks.forward = lambda x: blocks[0](x)
    (found,) = sums_of_steps(watch, 1)
    # the turn of block 1
    assert [found[name][codes.REPLAYED] for name in ("0.0", "1.0")] == [1, 1]
