"""Random state dicts: loaded from one optimizer into another, and damaged ones loaded into CoatAdamW."""

import copy
import io
import random
from unittest import mock

import cpuinfo
import torch
from hypothesis import given
from hypothesis import strategies as st

from coat_ds import CoatAdamW
from coat_ds.optim.options import MOMENTS
from coat_kernels.codecs import SIGNED_CODECS, Encoded, get_codec
from tests.coat_ds.faithful import assert_faithful
from tests.hostile.files import tries
from tests.hosts import without_compilation

SHAPES = [(1,), (5,), (130,), (300,), (5, 33), (20, 30)]
CPU = cpuinfo.get_cpu_info()
PEERS = ("AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam", "CoatAdamW")


SECOND = ("fp32", "fp8_expanded", "log8")
PAIRS = [(m, v) for m in SIGNED_CODECS for v in SECOND if get_codec(m).pairs_with(get_codec(v))]
# the relative pair as often as all others together
PAIRS += [("ratio8", "log8")] * len(PAIRS)


def optimizer_of(kind, params, rng):
    options = dict(lr=rng.choice([1e-3, 0.1]), betas=rng.choice([(0.9, 0.95), (0.8, 0.999)]), eps=1e-8)
    # torch.optim.Adam's decay is not AdamW's
    options["weight_decay"] = 0.0 if kind == "Adam" else rng.choice([0.0, 0.1])
    if kind == "CoatAdamW":
        exp_avg_format, exp_avg_sq_format = rng.choice(PAIRS)
        return CoatAdamW(
            params,
            **options,
            exp_avg_format=exp_avg_format,
            exp_avg_sq_format=exp_avg_sq_format,
            min_numel=rng.choice([0, 100]),
        )
    if kind in ("AdamW", "Adam"):
        return getattr(torch.optim, kind)(params, **options)
    import deepspeed.ops.adam as adam

    without_compilation()
    # the query of the CPU takes a second each time
    with mock.patch("cpuinfo.get_cpu_info", return_value=CPU):
        return getattr(adam, kind)(params, **options)


def params_of(shapes):
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def train(optimizer, params, steps, rng):
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) ** 3
        optimizer.step()


def through_file(packed):
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def moments_of(optimizer, p):
    state = optimizer.state[p]
    return [x.decode() if hasattr(x := state[name], "decode") else x for name in MOMENTS]


@tries(0.1)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from(PEERS), min_size=1, max_size=3),
    st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_states_go_through_any_chain_of_optimizers(seed, kinds, shapes, steps):
    """Each optimizer has the moments, the steps and the options of the one before it, rounded to its own
    formats."""
    rng = random.Random(seed)
    # other optimizers cannot read each other's state dicts
    kinds = [kind for peer in kinds for kind in ("CoatAdamW", peer)] + ["CoatAdamW"]
    kinds = kinds[rng.randrange(2) :]
    params = params_of(shapes)
    before = optimizer_of(kinds[0], params, rng)
    train(before, params, steps, rng)
    for kind in kinds[1:]:
        params = params_of(shapes)
        after = optimizer_of(kind, params, rng)
        packed = copy.deepcopy(before.state_dict())
        (group,) = packed["param_groups"]
        # older versions of torch have fewer options, and count steps as numbers
        for key in ("foreach", "capturable", "maximize", "differentiable", "fused"):
            if rng.random() < 0.3 and kind == "CoatAdamW":
                group.pop(key, None)
        if rng.random() < 0.3 and kind == "CoatAdamW":
            for entry in packed["state"].values():
                entry["step"] = int(entry["step"])
        after.load_state_dict(through_file(packed) if rng.random() < 0.5 else packed)
        for name in ("lr", "betas", "eps", "weight_decay"):
            assert after.param_groups[0][name] == group[name]
        for p, q in zip(before.param_groups[0]["params"], params, strict=True):
            for name, old, new in zip(MOMENTS, moments_of(before, p), moments_of(after, q), strict=True):
                if kind != "CoatAdamW" or after.state[q][name].pieces[0].codec.name == "fp32":
                    assert torch.equal(old, new)
                else:
                    codec = after.state[q][name].pieces[0].codec
                    second = after.state[q]["exp_avg_sq"]
                    relative_to = Encoded(second.pieces[0].codec, second.pieces[0].storage)
                    encoded = codec.encode(old, relative_to=relative_to)
                    rounded = codec.decode(encoded, relative_to=relative_to).view(old.shape)
                    close = (torch.isclose(new, x, rtol=2e-4, atol=0) for x in (old, rounded))
                    assert (next(close) | next(close)).all()
                    if codec.name == "fp8_expanded":
                        assert_faithful(new, old)
        count = max(int(entry["step"]) for entry in before.state.values())
        counts = [int(after.state[q]["step"]) for q in params]
        # FusedAdam counts in the state of its last parameter alone
        assert counts[-1] == count and (kind == "FusedAdam" or set(counts) == {count})
        train(after, params, 1, rng)
        before = after


def damages(rng):
    """Ways to damage a state dict, by name."""
    moment, other = rng.choice(MOMENTS), rng.choice(["lr", "eps", "weight_decay"])
    numbers = [None, "x", -1.0, torch.nan, [1], torch.zeros(2), {}]
    pairs = [None, 0.9, (0.9,), (0.9, 1.5), ("x", 0.9), (0.9, torch.nan)]
    steps = [None, "x", torch.nan, -1, torch.tensor(-3.0), torch.zeros(2), 2.5, torch.inf, 2**31, 2**70, [1]]
    tensors = [torch.zeros(()), torch.zeros(3, 3, 3), torch.zeros(0), torch.ones(5, dtype=torch.int64)]
    tensors += [torch.zeros(5, dtype=torch.complex64), torch.zeros(5).to_sparse()]
    values = [None, "x", [1.0], {}, 3, object(), *tensors]
    lists = [None, 3, {}, "x", [3], [None]]

    def group(d):
        return d["param_groups"][0]

    def index(d):
        return rng.choice(list(d["state"]))

    def entry(d):
        return d["state"][index(d)]

    def put(place, key, choices):
        return lambda d: place(d).__setitem__(key, rng.choice(choices))

    def itself(d):
        return d

    return {
        "no moment": lambda d: entry(d).pop(moment),
        "a moment of another kind": put(entry, moment, values),
        "no step": lambda d: entry(d).pop("step"),
        "a step of another kind": put(entry, "step", steps),
        "an entry of another kind": lambda d: put(lambda d: d["state"], index(d), [3, "x", [1]])(d),
        "states of another kind": put(itself, "state", [None, 3, [1], "x"]),
        "no states": lambda d: d.pop("state"),
        "no groups": lambda d: d.pop("param_groups"),
        "groups of another kind": put(itself, "param_groups", lists),
        "no parameters": lambda d: group(d).pop("params"),
        "other parameters": put(group, "params", [None, [], [0, 0, 0, 0, 0], 3, "x"]),
        "one more group": lambda d: d["param_groups"].append(copy.deepcopy(group(d))),
        "an option": put(group, other, numbers),
        "betas": put(group, "betas", pairs),
        "a switch": put(group, rng.choice(["amsgrad", "bias_correction", "fused"]), [None, True, False, "x"]),
        "no options": lambda d: d["param_groups"].__setitem__(0, {"params": group(d)["params"]}),
        "a remainder": put(entry, "remainder", values),
    }


@tries(0.1)
@given(st.integers(0, 2**32 - 1), st.sampled_from(list(damages(random.Random(0)))), st.booleans())
def test_damaged_state_dicts_are_refused_before_anything_changes(seed, name, of_ours):
    rng = random.Random(seed)
    shapes = [rng.choice(SHAPES) for _ in range(rng.randint(1, 3))]
    params = params_of(shapes)
    before = optimizer_of("CoatAdamW" if of_ours else "AdamW", params, rng)
    train(before, params, 2, rng)
    packed = copy.deepcopy(before.state_dict())
    damages(rng)[name](packed)
    params = params_of(shapes)
    after = optimizer_of("CoatAdamW", params, rng)
    train(after, params, 1, rng)
    state = [moments_of(after, p) + [after.state[p]["step"].clone()] for p in params]
    options = dict(after.param_groups[0])
    try:
        after.load_state_dict(packed)
    except ValueError as error:
        assert "load_state_dict" in str(error) or "parameter group" in str(error), error
        assert {**after.param_groups[0], "params": 0} == {**options, "params": 0}
        for p, old in zip(params, state, strict=True):
            new = moments_of(after, p) + [after.state[p]["step"].clone()]
            assert all(map(torch.equal, new, old))
    else:
        # a state that loads can make a step
        train(after, params, 1, rng)
        for p in params:
            assert p.isfinite().all()
            assert all(x.isfinite().all() and x.shape == p.shape for x in moments_of(after, p))
