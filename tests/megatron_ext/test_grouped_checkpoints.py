"""Checkpoints of experts of `--moe-grouped-gemm` are those of Megatron's SequentialMLP, at any parallel size.

Transformer Engine's grouped experts write the same parts: Megatron's own claim, since they cannot run here.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from coat_ds.config import CoatConfig
from tests.megatron_ext.checkpointed import build_gpt_of, load, save, shake, sharded, stock_gpt
from tests.megatron_ext.experts import EXPERTS, GPT, GROUPED
from tests.megatron_ext.layers import whole
from tests.megatron_ext.trainer import Trainer, plain_states
from tests.util import run_distributed

pytestmark = pytest.mark.early

# each rank's part consists of whole groups
CONFIG = EXPERTS | {"moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": None}
LAYOUTS = {
    "expert parallel": ({"expert_model_parallel_size": 2}, CONFIG),
    "biases": ({"expert_model_parallel_size": 2}, CONFIG | GPT),
    "tensor parallel": ({"tensor_model_parallel_size": 2}, CONFIG),
}
# whether each rank writes its own shard alone (singleton_local_shards)
ALONE = {"expert parallel": (False, True), "biases": (False,), "tensor parallel": (False,)}
MOMENTS = ("exp_avg", "exp_avg_sq")


def _grouped(config, seed):
    from megatron_ext.layer_specs import coat_layer_spec

    return build_gpt_of(coat_layer_spec, config | GROUPED, seed)


def _flat(parts):
    return [leaf for part in parts for leaf in _flat(part)] if isinstance(parts, list) else [parts]


def _places(model, alone):
    """The parts of tensors in a checkpoint, without the model's names for them."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found = []
    for entry in sharded(model, alone).values():
        for part in _flat(entry.build() if isinstance(entry, ShardedTensorFactory) else entry):
            place = part.key, part.global_shape, part.global_offset, part.replica_id
            if isinstance(part, ShardedTensor):
                place += part.local_shape, part.axis_fragmentations, part.dtype, part.prepend_axis_num
            found.append(place)
    return sorted(found, key=str)


def _load(model, folder, alone=False):
    load(model, folder, alone)
    return _weights(model)


def _weights(model):
    """Every whole weight, by the names of SequentialMLP and with the number of each expert in the model."""
    from megatron.core import parallel_state

    found, rank = {}, parallel_state.get_expert_model_parallel_rank()
    for name, p in model.named_parameters():
        value = whole(p, p.detach().clone())
        before, experts, after = name.partition(".mlp.experts.")
        if not experts:
            found[name] = value
        elif "local_experts" in after:
            _, number, after = after.split(".", 2)
            count = model.decoder.layers[1].mlp.num_local_experts
            found[f"{before}.{rank * count + int(number)}.{after}"] = value
        else:
            found |= {f"{before}.{rank * len(value) + i}.{after}": one for i, one in enumerate(value)}
    return found


def _optimizers(folder):
    """Whole states of a run with experts one after another, and those of the run with grouped experts that
    loaded them."""
    from megatron_ext.optimizer import patches as optimizer

    plain = {"exp_avg_format": "fp32", "exp_avg_sq_format": "fp32"}
    optimizer.install(CoatConfig.from_dict({"enabled": True, "optimizer": plain}))
    found = []
    for mode in ("distributed", "plain"):
        names = [str(folder / f"{mode} {name}") for name in ("one by one", "grouped", "again")]
        first = Trainer(mode, "coat", **CONFIG)
        losses = first.steps(0, 1)
        sharding = "fully_reshardable"
        first.save(names[0], sharding)
        grouped = Trainer(mode, "coat", **(CONFIG | GROUPED)).load(names[0], sharding)
        grouped.save(names[1], sharding)
        Trainer(mode, "coat", **CONFIG).load(names[1], sharding).save(names[2], sharding)
        found.append((losses, grouped.steps(2), [plain_states(name) for name in names]))
    optimizer.uninstall()
    return found


def _by_places(folder):
    """Results of loading `dp_reshardable` states: errors, and losses after and before."""
    from coat_ds.config import CoatConfigError
    from megatron_ext.optimizer import parameter_order
    from megatron_ext.optimizer import patches as optimizer

    sharding, found = parameter_order.SHARDING, {}
    kinds = {"one by one": CONFIG, "grouped": CONFIG | GROUPED}
    for name in ("unmarked", "one by one", "grouped"):
        if name == "one by one":
            optimizer.install(CoatConfig(enabled=True))
        first = Trainer("distributed", "coat", **kinds.get(name, CONFIG))
        first.steps(0, 1)
        first.save(str(folder / f"{name} {sharding}"), sharding)
        found["expected", name] = first.steps(2)
    for name, kind in (("unmarked", "one by one"), *itertools.product(kinds, kinds)):
        config = kinds[kind]
        try:
            again = Trainer("distributed", "coat", **config).load(
                str(folder / f"{name} {sharding}"), sharding
            )
            found[name, kind] = again.steps(2)
        except CoatConfigError as error:
            found[name, kind] = str(error)
    # the tensors of a single expert are its matrices
    single = CONFIG | {"num_moe_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True}
    Trainer("distributed", "coat", **single).save(str(folder / f"single {sharding}"), sharding)
    Trainer("distributed", "coat", **(single | GROUPED)).load(str(folder / f"single {sharding}"), sharding)
    # and in a run without COAT's optimizer
    optimizer.uninstall()
    stock = Trainer("distributed", "coat", **CONFIG)
    stock.steps(0)
    found["stock"] = stock.load(str(folder / f"one by one {sharding}"), sharding).steps(2)
    return found


def _two_ranks(folder):
    from megatron.core import parallel_state

    from megatron_ext import cpu
    from megatron_ext.model import initialize_model_parallel

    cpu.enable()
    dist.init_process_group("gloo")
    result = {}
    with cpu.no_cuda():
        for layout, (sizes, config) in LAYOUTS.items():
            initialize_model_parallel(**sizes)
            config = config | sizes
            stock, grouped = stock_gpt(config, seed=1), _grouped(config, seed=2)
            shake(stock)
            result[layout] = {
                "places": [(_places(grouped, alone), _places(stock, alone)) for alone in (False, True)],
                "saved": _weights(stock),
            }
            for alone in ALONE[layout]:
                folders = [folder / f"{layout} {name} {alone}" for name in ("stock", "grouped")]
                save(stock, folders[0], alone)
                loaded = _grouped(config, seed=3)
                result[layout]["loaded", alone] = _load(loaded, folders[0], alone)
                save(loaded, folders[1], alone)
                result[layout]["loaded again", alone] = _load(stock_gpt(config, seed=4), folders[1], alone)
            if layout == "tensor parallel":
                # each rank has all experts and loads the checkpoints of two ranks with two experts each
                for name in ("stock", "grouped"):
                    source = folder / f"expert parallel {name} False"
                    result["other sizes", name] = _load(_grouped(config, seed=5), source)
            parallel_state.destroy_model_parallel()
        initialize_model_parallel(expert_model_parallel_size=2)
        config = CONFIG | {"expert_model_parallel_size": 2}
        source = folder / "tensor parallel grouped False"
        result["other sizes", "back"] = _load(_grouped(config, seed=6), source)
        parallel_state.destroy_model_parallel()
        initialize_model_parallel()
        result["optimizers"] = _optimizers(folder)
        result["by places"] = _by_places(folder)
    return result


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_distributed(_two_ranks, 2, tmp_path_factory.mktemp("checkpoints"))


def _equal(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert weight.equal(found[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_experts_sharded_state_dict_equals_megatrons(ranks, layout):
    for rank in ranks:
        for grouped, stock in rank[layout]["places"]:
            assert grouped == stock and sum(".experts." in place[0] for place in stock) >= 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_experts_load_megatrons_checkpoints_and_go_back(ranks, layout):
    for rank in ranks:
        for alone in ALONE[layout]:
            for when in ("loaded", "loaded again"):
                _equal(rank[layout][when, alone], rank[layout]["saved"])


def test_grouped_experts_load_checkpoints_of_other_parallel_sizes(ranks):
    every = ranks[0]["expert parallel"]["saved"] | ranks[1]["expert parallel"]["saved"]
    for rank in ranks:
        for name in ("stock", "grouped"):
            _equal(rank["other sizes", name], every)
        back, saved = rank["other sizes", "back"], rank["tensor parallel"]["saved"]
        assert len(back) == len(saved) - 4
        _equal(back, {name: saved[name] for name in back})


def test_grouped_experts_exchange_optimizer_states_with_sequential_ones(ranks):
    for losses, after, (one_by_one, grouped, again) in ranks[0]["optimizers"]:
        for moment in MOMENTS:
            assert any(moment in name and "experts.linear_fc1.weight" in name for name in one_by_one)
        _equal(grouped, one_by_one)
        _equal(again, one_by_one)
        assert after[0] < losses[0]


def test_dp_reshardable_states_of_other_experts_are_refused(ranks):
    for rank in ranks:
        found = rank["by places"]
        for kind, other in (("one by one", "grouped"), ("grouped", "one by one")):
            assert found[kind, kind] == found["expected", kind]
            # the parameters before it: the embedding, six of the dense layer, and attention, norms and router
            # of the other layer
            assert "expected parameter 12 of a rank" in found[kind, other]
            assert (
                "--moe-grouped-gemm as the run that saved them did, or --no-load-optim" in found[kind, other]
            )
        # AdamW's states have no shapes
        assert found["unmarked", "one by one"] == found["expected", "unmarked"]
        assert found["stock"] == found["expected", "one by one"]


@pytest.mark.parametrize("names", ["SequentialMLP", "TEGroupedMLP", "own"])
def test_grouped_experts_load_state_dicts_of_other_experts(megatron, names):
    config = CONFIG | GPT
    grouped, stock = _grouped(config, seed=1), stock_gpt(config, seed=2)
    saved = stock.state_dict()
    before = "decoder.layers.1.mlp.experts."
    of_experts = {name: saved.pop(name) for name in list(saved) if name.startswith(before)}
    experts = stock.decoder.layers[1].mlp.experts.local_experts
    for linear in ("linear_fc1", "linear_fc2"):
        for kind in ("weight", "bias"):
            parts = [getattr(getattr(expert, linear), kind).detach() for expert in experts]
            if names == "TEGroupedMLP":
                saved |= {f"{before}{linear}.{kind}{i}": part for i, part in enumerate(parts)}
                saved[f"{before}{linear}._extra_state"] = torch.zeros(0)
            elif names == "own":
                saved[f"{before}{linear}.{kind}"] = torch.stack(parts)
    grouped.load_state_dict(of_experts | saved if names == "SequentialMLP" else saved)
    _equal(_weights(grouped), _weights(stock))
    again = stock_gpt(config, seed=3)
    again.load_state_dict(grouped.state_dict())
    _equal(_weights(again), _weights(stock))


def test_grouped_experts_name_missing_keys(megatron):
    grouped = _grouped(CONFIG, seed=1)
    saved = grouped.state_dict()
    del saved["decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight"]
    with pytest.raises(RuntimeError, match="Missing key.*experts.linear_fc2.weight"):
        grouped.load_state_dict(saved)


def test_grouped_experts_state_dict_under_zero3(megatron):
    experts = _grouped(CONFIG, seed=1).decoder.layers[1].mlp.experts
    for p in experts.parameters():
        p.data = torch.empty(0)
    assert {f"linear_fc{i}.weight" for i in (1, 2)} == experts.state_dict().keys()


@pytest.mark.parametrize("strict", [True, False])
def test_grouped_experts_refuse_a_state_dict_of_some_experts(megatron, strict):
    """The error names the tensor, and the tensor is unchanged."""
    experts = _grouped(CONFIG, seed=1).decoder.layers[1].mlp.experts
    before = experts.linear_fc1.weight.clone()
    one = {"local_experts.1.linear_fc1.weight": torch.zeros_like(before[1])}
    if strict:
        with pytest.raises(
            RuntimeError, match="(?s)Missing key.*linear_fc1.weight.*Unexpected key.*local_experts.1"
        ):
            experts.load_state_dict(one)
    else:
        found = experts.load_state_dict(one, strict=False)
        assert "linear_fc1.weight" in found.missing_keys and list(one) == found.unexpected_keys
    assert experts.linear_fc1.weight.equal(before)
