"""Where readings go, and what `coat watch` says of them."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F

import coat_ds
from coat_ds import CoatAdamW, CoatConfig, CoatConfigError, cli
from coat_ds.config import WatchConfig
from coat_ds.layers.replaced import replaced
from coat_ds.watch import Watch, codes, jsonl, writer
from coat_ds.watch.fallback import Fallback
from coat_ds.watch.memory import held_bytes
from coat_ds.watch.outs import Reading, read
from coat_kernels import watching
from coat_kernels.graphs import Graphs, _Place
from tests.util import run_distributed


def reading(step, error):
    groups = {"layers.*.weight": {"update_error": error, "stalled": 0.25}, "layers.*": {"input_flushed": 0.5}}
    return Reading(step, 8 * step, groups, {"weights": 4_000_000, "saved": 1_500_000}, [])


@pytest.fixture
def run(tmp_path):
    write = jsonl(tmp_path / "run")
    # step 4 is run again after a checkpoint is loaded
    for step, error in ((2, 0.01), (4, 0.9), (4, 0.03), (6, 0.02)):
        write(reading(step, error))
    return tmp_path / "run"


def test_the_command_prints_a_table_and_draws(run, capsys):
    assert cli.main(["watch", str(run)]) == 0
    out = capsys.readouterr().out
    first, _, *rows = out.splitlines()
    assert first == "3 readings, steps 2 to 6"
    assert rows[0].split() == ["update_error", "2.00%", "3.00%", "4", "layers.*.weight"]
    assert rows[1].split() == ["stalled", "25.00%", "25.00%", "2", "layers.*.weight"]
    assert rows[2].split() == ["input_flushed", "50.00%", "50.00%", "2", "layers.*"]
    assert rows[3] == "MB of one rank: weights 4.0, saved 1.5" and rows[4] == "fallen back: nothing"
    for name in ("errors.png", "memory.png"):
        written = run / name
        assert f"wrote {written}" in out and written.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_command_says_what_the_last_reading_lacks(run, capsys):
    # as `wrong_scales` of layers that have all fallen back
    jsonl(run)(Reading(8, 64, {"layers.*.weight": {"stalled": 0.25}}, {}, ["layers.0"]))
    assert cli.main(["watch", str(run), "--no-pictures"]) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["update_error", "-", "3.00%", "4", "none", "has", "it"]


def test_the_command_as_json_and_elsewhere(run, tmp_path, capsys):
    assert cli.main(["watch", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == reading(6, 0.02)._asdict()
    assert cli.main(["watch", str(run / "watch.jsonl"), "--pictures", str(tmp_path / "new")]) == 0
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["errors.png", "memory.png"]
    assert not (run / "errors.png").exists()


@pytest.mark.parametrize("content", ["", "{}\n", "no\n"])
def test_the_command_says_what_is_wrong_in_the_file(tmp_path, capsys, content):
    (tmp_path / "watch.jsonl").write_text(content)
    assert cli.main(["watch", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    # no file: tests/test_mistakes.py
    assert f"RUN: {tmp_path}/watch.jsonl: " in error and "Correct the file" in error


def test_writers_as_megatrons():
    scalars, logged = [], []

    class Board:
        def add_scalar(self, *args):
            scalars.append(args)

    class Wandb:
        def log(self, numbers, step):
            logged.append((step, numbers))

    writer(Board(), Wandb())(reading(6, 0.02))
    writer()(reading(6, 0.02))
    numbers = reading(6, 0.02).flat()
    assert numbers["coat/update_error/layers.*.weight"] == 0.02 and numbers["coat/bytes/saved"] == 1.5e6
    assert logged == [(6, numbers)] and scalars == [(name, value, 6) for name, value in numbers.items()]


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def test_a_plain_loop(tmp_path):
    made = coat_ds.convert(model().bfloat16())
    optimizer = CoatAdamW(made.named_parameters(), min_numel=0)
    watch = Watch(made, optimizer, {"every": 3, "folder": str(tmp_path)})
    for _ in range(10):
        made(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.end_step()
    assert [r.step for r in read(tmp_path)] == [3, 6, 9]
    watch.close()
    groups = read(tmp_path)[-1].groups
    assert set(groups) == {"*.weight", "*"} and 0 < groups["*.weight"]["update_error"] < 0.1
    assert not made._forward_pre_hooks and not made._forward_hooks


def test_copies_of_a_model_are_not_watched(tmp_path):
    made = coat_ds.convert(model().bfloat16())
    watch = Watch(made, CoatAdamW(made.named_parameters()), {"every": 1, "folder": str(tmp_path)})
    torch.save(made, tmp_path / "model.pt")
    for other in (copy.deepcopy(made), torch.load(tmp_path / "model.pt", weights_only=False)):
        other(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
        assert watch._counter is None
    made(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
    assert watch._counter is not None
    watch.close()
    assert watching.observer() is None


@pytest.mark.parametrize("config", [{"every": 0, "folder": "x"}, {"every": 1}])
def test_nothing_is_measured_where_nobody_wants_it(config):
    made = coat_ds.convert(model().bfloat16())
    watch = Watch(made, CoatAdamW(made.named_parameters()), config)
    assert not watch.is_active and not made._forward_pre_hooks
    made(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
    assert watch._counter is None
    watch.end_step()
    assert watch.last is None


def test_a_limit_is_passed_in_readings_in_a_row():
    kept, said = [], []
    config = WatchConfig(act="act", readings=2, update_error=0.1)
    fallback = Fallback(
        model(), config, lambda *args: kept.append(args), lambda line, level: said.append(line)
    )
    for step, error in enumerate((0.2, 0.05, 0.2, float("nan"), 0.2, 0.3, 0.4), 1):
        fallback.judge(step, {"0.weight": {"update_error": error}, "1.weight": {"update_error": 0.1}}, {})
    assert kept == [("0.weight", True)] and fallback.state() == {"layers": [], "states": ["0.weight"]}
    (line,) = said
    assert line == (
        "COAT: step 6: 0.weight: the update's error was 0.3, above 0.1, 2 readings in a row: it keeps FP32 "
        "moments from now on"
    )
    fallback.restore({"layers": [], "states": []})
    assert kept[1:] == [("0.weight", False)]
    # counted anew
    for step in (8, 9):
        assert len(kept) == 2
        fallback.judge(step, {"0.weight": {"update_error": 0.2}}, {})
    assert kept[2:] == [("0.weight", True)]


def test_a_reading_without_figures_counts_neither_way():
    """As of a layer that was replayed, whose turn it was not, and of tensors whose step was skipped."""
    config = WatchConfig(act="act", readings=2)
    fallback = Fallback(coat_ds.convert(model().bfloat16()), config, lambda *_: None, lambda *_: None)
    over = {"0": {"input_flushed": 1.0}, "1": {"gradient_flushed": 0.1}}
    fallback.judge(1, {"1.weight": {"update_error": 0.9}}, over)
    assert fallback.suspects == ["0"]
    fallback.judge(2, {"1.weight": {}}, {"0": {}, "1": {"saved_flushed": 1.0}})
    assert fallback.suspects == ["0"] and fallback.state() == {"layers": [], "states": []}
    fallback.judge(3, {"1.weight": {"update_error": 0.9}}, over)
    assert fallback.state() == {"layers": ["0"], "states": ["1.weight"]}
    fallback.restore({})
    fallback.judge(4, {}, over)
    fallback.judge(5, {}, {"0": {"input_flushed": 0.1}})
    assert not fallback.suspects


def with_graphs(layers):
    """Has layers seem to be recorded. On a CPU they run in Python all the same."""
    for layer in layers:
        layer.graphs = Graphs()
        layer.graphs._places["a shape"] = _Place("addresses")
        layer.graphs._places["a shape"].recordings.append("a recording")


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
    readings = []
    watch = Watch(blocks, None, {"every": 1}, [readings.append])
    (first,) = sums_of_steps(watch, 1, closes=False)
    # the turn of block 1 was the first reading's, and is that of the third
    watch.go_on_from(2)
    blocks.forward = lambda x: blocks[0](x)
    (second,) = sums_of_steps(watch, 1)
    assert second["1.0"][codes.REPLAYED] == 1 and second["1.0"][0] == 0
    assert watch._earlier["1.0"] == first["1.0"] and first["1.0"][0] > 0


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


def test_the_first_step_counts_the_states_that_it_makes():
    made, readings = coat_ds.convert(model().bfloat16()), []
    optimizer = CoatAdamW(made.named_parameters(), min_numel=0)
    watch = Watch(made, optimizer, {"every": 1}, [readings.append])
    for _ in range(2):
        made(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        watch.end_step()
    watch.close()
    assert readings[0].memory == readings[1].memory
    assert readings[0].memory["states"] == coat_ds.state_bytes(optimizer)["bytes"] > 0


COMPILED = {
    "itself": lambda made, **how: made.compile(**how) or made,
    "a layer": lambda made, **how: made[0].compile(**how) or made,
    "a wrapper": lambda made, **how: torch.compile(made, **how),
}


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("way", COMPILED)
def test_a_reading_has_nothing_compiled_again(way, is_given):
    """is_given: the watch gets what `torch.compile` returns; otherwise the model that was compiled."""
    made, graphs, said = coat_ds.convert(model().bfloat16()), [], []
    torch._dynamo.reset()
    called = COMPILED[way](made, backend=lambda graph, inputs: graphs.append(graph) or graph)
    optimizer, readings = CoatAdamW(made.named_parameters(), min_numel=0), []
    watch = Watch(
        called if is_given else made,
        optimizer,
        {"every": 2},
        [readings.append],
        say=lambda line, level: said.append(line),
    )
    counts = []
    for _ in range(10):
        called(torch.randn(16, 64).bfloat16()).sum().backward()
        optimizer.step()
        watch.end_step()
        counts.append(len(graphs))
    watch.close()
    assert counts == [1] * 10
    assert len(readings) == 5 and len(said) == 1 and "no codes" in said[0]
    figures = {figure for found in readings[-1].groups.values() for figure in found}
    assert figures == {"update_error", "stalled", "underflowed"}
    assert readings[-1].memory["states"] and "saved" not in readings[-1].memory


def test_a_layer_that_falls_back_computes_in_bf16_until_watching_ends():
    made = coat_ds.convert(torch.nn.Sequential(model(), model()).bfloat16())
    # recorded layers replay what they did before
    with_graphs(made)
    config = {"every": 1, "act": "act", "readings": 1, "folder": ""}
    watch = Watch(made, CoatAdamW(made.named_parameters()), config)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    before = made(x)
    watch.fallback.judge(1, {}, {"1.0": {"input_flushed": 1.0}})
    assert [layer.graphs.count for layer in made] == [1, 0]
    linear = made[1][0]
    y = made[0](x)
    assert linear(y).equal(F.linear(y, linear.weight, linear.bias)) and not made(x).equal(before)
    watch.close()
    assert made(x).equal(before)


def test_all_layers_of_a_joint_product_fall_back():
    from tests.coat_ds.watch.test_engine import llama

    made = coat_ds.convert(llama())
    watch = Watch(
        made, CoatAdamW(made.named_parameters()), {"every": 1, "act": "act", "readings": 1, "folder": ""}
    )
    layer = made.model.layers[0]
    watch.fallback.judge(1, {}, {"model.layers.0.qkv": {"input_flushed": 1.0}})
    projections = {layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj}
    assert {m for m in made.modules() if getattr(replaced(m), "paused", False)} == projections
    watch.fallback.judge(2, {}, {"model.layers.0.mlp.both": {"gradient_flushed": 1.0}})
    both = {layer.mlp.gate_proj, layer.mlp.up_proj}
    assert {m for m in made.modules() if getattr(replaced(m), "paused", False)} == projections | both


@pytest.mark.parametrize(
    "block, message",
    [
        ({"every": -1}, "coat.watch.every: expected 0 or more, found -1"),
        ({"every": 1.5}, "coat.watch.every: expected an integer, found 1.5"),
        (
            {"act": "Act"},
            "coat.watch.act: expected one of 'off', 'warn', 'act'; found 'Act'. Did you mean 'act'",
        ),
        ({"folder": 3}, "coat.watch.folder: expected a string, found 3"),
        ({"flushed": "much"}, "coat.watch.flushed: expected a number, found 'much'"),
        ({"evry": 3}, "coat.watch.evry: unknown key"),
    ],
)
def test_a_wrong_block_says_so(block, message):
    with pytest.raises(CoatConfigError) as error:
        CoatConfig.from_dict({"enabled": True, "watch": block})
    assert message in str(error.value)


def test_booleans_and_defaults():
    assert CoatConfig.from_dict({"enabled": True}).watch == WatchConfig()
    assert CoatConfig.from_dict({"enabled": True, "watch": True}).watch.every == 100
    assert CoatConfig.from_dict({"enabled": True, "watch": False}).watch.every == 0
    assert WatchConfig(flushed=1).flushed == 1


@pytest.mark.parametrize("watch, key", [({"act": "warn"}, "act"), ({"folder": "x"}, "folder"), ({}, None)])
def test_an_engine_that_is_not_watched_says_so(watch, key):
    from coat_ds.zero.watch import watch_engine

    class PipelineEngine:
        def train_batch(self):
            pass

    if key is None:
        assert watch_engine(PipelineEngine(), WatchConfig(), True) is None
        return
    with pytest.raises(CoatConfigError, match=f"coat.watch.{key}: found .*pipeline engine"):
        watch_engine(PipelineEngine(), WatchConfig(**watch), True)


def two_ranks():
    """Each rank holds half of the optimizer's partition, and its own half of the batch."""
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "coat": {"enabled": True, "optimizer": {"min_numel": 0}, "watch": {"every": 1}},
    }
    engine, *_ = coat_ds.initialize(model=model(), config=config)
    seen = []
    engine.coat.watch.add(seen.append)
    rank = torch.distributed.get_rank()
    for step in range(3):
        # rank 0 reads zeros
        x = torch.full((4, 64), float(rank * (step + 1)), dtype=torch.bfloat16)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    last = engine.coat.watch.last
    engine.destroy()
    return last.groups, len(seen)


def test_sums_are_over_all_ranks():
    (first, written), (second, unwritten) = run_distributed(two_ranks, 2)
    assert first == second
    assert (written, unwritten) == (3, 0)
    # both layers are one group: the first reads zeros on one rank, the second its biases
    assert first["*"]["input_flushed"] == pytest.approx(0.25, abs=0.01)
    assert 0 < first["*.weight"]["update_error"] < 0.1


def by_themselves():
    """Ranks that train models of their own, each a group."""
    torch.distributed.init_process_group("gloo")
    groups = [torch.distributed.new_group([rank]) for rank in range(2)]
    rank = torch.distributed.get_rank()
    made = coat_ds.convert(model().bfloat16())
    optimizer = CoatAdamW(made.named_parameters())
    watch = Watch(made, optimizer, {"every": 1, "act": "warn"}, process_group=groups[rank])
    made(torch.full((16, 64), float(rank), dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    watch.end_step()
    watch.take_in()
    return watch.last.groups["*"]["input_flushed"]


def test_sums_are_over_the_ranks_of_a_group():
    # of the two layers' inputs one is zero, or none
    assert run_distributed(by_themselves, 2) == [pytest.approx(0.5, abs=0.02), pytest.approx(0, abs=0.02)]


def test_copies_of_weights_are_counted():
    from tests.coat_ds.watch.test_engine import llama

    made = coat_ds.convert(llama(), {"weight_cache": "fp8"})
    ids = torch.arange(32).view(1, 32)
    made(ids, labels=ids).loss.backward()
    linears = [made.get_submodule(name).weight for name in coat_ds.conversion_of(made).converted["linear"]]
    # by rows and by columns; and the scale twice, of four products in each of two layers
    held = held_bytes(made, [], [*made.parameters(), torch.zeros(5)])
    assert held["fp8_copies"] == 2 * sum(w.numel() for w in linears) + 8 * 4 * 2
    # a weight that is its own master is no other
    assert held["weights"] > 2 * 4 * 64 * 64 and held["masters"] == 5 * 4


def test_trainer_logs_readings(tmp_path):
    from transformers import Trainer, TrainingArguments

    from coat_ds.watch import Callback
    from tests.coat_ds.watch.test_engine import llama

    made = coat_ds.convert(llama())
    rows = [(torch.arange(32) + i) % 64 for i in range(32)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        logging_steps=100,
    )
    optimizer = CoatAdamW(made.named_parameters(), min_numel=0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = Trainer(made, arguments, train_dataset=data, optimizers=(optimizer, schedule))
    trainer.add_callback(Callback(trainer, {"every": 2}))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "coat/step" in entry]
    assert [entry["coat/step"] for entry in logged] == [2, 4]
    # it has ended
    assert not [m for m in made.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not optimizer._optimizer_step_post_hooks
    name = "coat/update_error/model.layers.*.mlp.up_proj.weight"
    assert all(0 < entry[name] < 0.1 for entry in logged)
    assert logged[-1]["coat/bytes/states"] == coat_ds.state_bytes(optimizer)["bytes"]


def test_trainer_without_our_optimizer():
    from coat_ds.watch import Callback

    callback = Callback(object())
    with pytest.raises(ValueError, match="expected a CoatAdamW, found AdamW"):
        callback.on_train_begin(None, None, None, model(), torch.optim.AdamW(model().parameters()))
