"""The parameters of a COAT model are Megatron's: their attributes, and Megatron's distributed checkpoints."""

import pytest
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from megatron_ext.cpu import enable, no_cuda
from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec
from tests.megatron_ext.checkpointed import build_gpt_of, load, save, shake, sharded, stock_gpt
from tests.megatron_ext.experts import EXPERTS
from tests.megatron_ext.layers import GPT, whole
from tests.megatron_ext.ranks import join
from tests.util import run_distributed

LLAMA = {"qk_layernorm": True}
# (process groups, fields of the model's config)
MODELS: dict[str, tuple[dict, dict]] = {
    "llama": ({"tensor_model_parallel_size": 2}, LLAMA),
    "gpt": ({"tensor_model_parallel_size": 2}, GPT),
    "experts": ({"expert_model_parallel_size": 2}, EXPERTS | {"expert_model_parallel_size": 2}),
    "experts of parts": ({"tensor_model_parallel_size": 2}, EXPERTS),
}
# attributes of parameters that Megatron reads, and the defaults that it uses for missing ones
MARKS = {
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
    "sequence_parallel": False,
    "allreduce": True,
}


def _marks(model):
    return {
        name: {mark: vars(p).get(mark, MARKS.get(mark)) for mark in MARKS.keys() | vars(p).keys()}
        for name, p in model.named_parameters()
    }


def _weights(model):
    return {name: whole(p, p.detach().clone()) for name, p in model.named_parameters()}


def _places(model):
    """The tensor of the checkpoint and the part of it that each entry stands for."""
    found = {}
    for name, entry in sharded(model).items():
        parts = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for i, part in enumerate(parts):
            if isinstance(part, ShardedTensor):
                place = (part.local_shape, part.axis_fragmentations, part.dtype)
            else:
                assert isinstance(part, ShardedObject)
                place = ()
            found[name, i] = (part.key, part.global_shape, part.global_offset, part.replica_id, *place)
    return found


def _two_ranks(folder):
    enable()
    result = {}
    with no_cuda():
        for name, (groups, config) in MODELS.items():
            join(**groups)
            stock, coat = stock_gpt(config, seed=1), build_gpt_of(coat_layer_spec, config, seed=2)
            found = {
                "marks": (_marks(coat), _marks(stock)),
                "places": (_places(coat), _places(stock)),
            }
            if "tensor_model_parallel_size" in groups:
                # Megatron's own torch norms refuse sequence parallelism
                found["marks of a sequence's parts"] = tuple(
                    _marks(build_gpt_of(spec, config, seed=1, sequence_parallel=True))
                    for spec in (coat_layer_spec, sdpa_layer_spec)
                )
            if name in ("llama", "experts"):
                shake(stock)
                found["saved"] = _weights(stock)
                save(stock, folder / f"stock {name}")
                load(coat, folder / f"stock {name}")
                found["loaded"] = _weights(coat)
                save(coat, folder / f"coat {name}")
                again = stock_gpt(config, seed=3)
                load(again, folder / f"coat {name}")
                found["loaded again"] = _weights(again)
            result[name] = found
            parallel_state.destroy_model_parallel()
    return result


def _one_rank(folder):
    join()
    result = {}
    with no_cuda():
        for name in ("llama", "experts"):
            config = MODELS[name][1] | ({"expert_model_parallel_size": 1} if name == "experts" else {})
            for source, model in (
                ("stock", build_gpt_of(coat_layer_spec, config, seed=4)),
                ("coat", stock_gpt(config, seed=5)),
            ):
                load(model, folder / f"{source} {name}")
                result[name, source] = _weights(model)
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_distributed(_two_ranks, 2, folder), run_distributed(_one_rank, 1, folder)[0]


@pytest.mark.parametrize("name", MODELS)
def test_parameters_have_the_attributes_of_megatrons(runs, name):
    for rank in runs[0]:
        coat, stock = rank[name]["marks"]
        assert coat == stock
        if "marks of a sequence's parts" in rank[name]:
            coat, bf16 = rank[name]["marks of a sequence's parts"]
            assert coat == bf16
            norms = {n for n in coat if "layernorm" in n and not ("q_" in n or "k_" in n)}
            assert len(norms) >= 5 and all(coat[n]["sequence_parallel"] for n in norms)


@pytest.mark.parametrize("name", MODELS)
def test_sharded_state_dict_equals_megatrons(runs, name):
    for rank in runs[0]:
        coat, stock = rank[name]["places"]
        assert coat == stock and len(stock) > 10


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_checkpoints_of_megatrons_layers_load_and_go_back(runs, name):
    for rank in runs[0]:
        found = rank[name]
        for when in ("loaded", "loaded again"):
            assert found["saved"].keys() == found[when].keys()
            for parameter, weight in found["saved"].items():
                assert weight.equal(found[when][parameter]), (when, parameter)


@pytest.mark.parametrize("source", ["stock", "coat"])
def test_checkpoints_of_two_ranks_load_in_one(runs, source):
    ranks, one = runs
    for name, weight in ranks[0]["llama"]["saved"].items():
        # fc1's ranks hold parts of the gate and of up
        assert weight.equal(one["llama", source][name]), name
    found = one["experts", source]
    for rank, saved in enumerate(ranks):
        for name, weight in saved["experts"]["saved"].items():
            before, expert, after = name.partition("local_experts.")
            if expert:
                # each rank holds two of the four experts
                number, _, after = after.partition(".")
                name = f"{before}{expert}{2 * rank + int(number)}.{after}"
            assert weight.equal(found[name]), name
