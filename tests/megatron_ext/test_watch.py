"""Megatron's training watched: readings, the fallback of layers and of states, and that all ranks agree.

One spawn of two processes serves most tests.
"""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from coat_ds.config import CoatConfig, WatchConfig
from coat_ds.watch import fallback as of_fallback
from coat_ds.watch.readings import read
from coat_kernels.graphs import Place
from megatron_ext import cpu, mpu
from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.model import ModelShape, build_gpt
from megatron_ext.optimizer import seam
from megatron_ext.optimizer.watch import watch_optimizer
from tests.megatron_ext.ranks import join
from tests.megatron_ext.test_moe import ALL_TO_ALL, EACH_ONE, EXPERTS
from tests.megatron_ext.trainer import FFN, B, S, Trainer
from tests.util import run_distributed

pytestmark = pytest.mark.early

INJECTED, STEPS = 3, 18
# an outlier feature, so large that FP8 loses all other values
FACTOR = 2.0**20
EP2 = {"expert_model_parallel_size": 2}
NOTHING = {"layers": [], "states": []}


def watches(watch, readings=2):
    """Later optimizers are built with this block of the watch; `readings` readings above a limit count."""
    of_fallback.READINGS = readings
    block = {"enabled": True, "optimizer": {"min_numel": 0}, "watch": watch}
    seam.uninstall()
    seam.install(CoatConfig.from_dict(block))


class Learner(Trainer):
    """Trains on learnable data. In each layer one channel of the input of fc2 is not trained, so that it can
    become an outlier."""

    def __init__(self, watch, readings=2, **options):
        watches(watch, readings)
        super().__init__("distributed", "coat", **options)
        up, self._fixed = FFN // parallel_state.get_tensor_model_parallel_world_size() + 3, []
        for layer in self.model.module.decoder.layers:
            fc1, fc2 = layer.mlp.linear_fc1.weight, layer.mlp.linear_fc2.weight
            self._fixed += [(fc1, up), (fc2, (slice(None), 3))]
        self.watch = self.optimizer.coat_watch
        for group in self.inner.param_groups:
            group["lr"] = 5e-3

    def chain_anew(self):
        """Builds a new chain, as Megatron does with Muon."""
        self.optimizer = ChainedOptimizer(self.optimizer.chained_optimizers)
        self.watch = self.optimizer.coat_watch
        return self

    def inject(self):
        """Makes the channel an outlier; in BF16 the model's output is unchanged."""
        for (fc1, up), (fc2, column) in zip(self._fixed[::2], self._fixed[1::2], strict=True):
            with torch.no_grad():
                fc1[up] *= FACTOR
                fc2[column] /= FACTOR
        self.optimizer.reload_model_params()

    @staticmethod
    def tokens(number, rank):
        return (torch.arange(S) * (1 + number % 3) + 8 * torch.arange(4)[:, None] + 32 * rank) % 64

    def loss(self, number):
        tokens = self.tokens(number, parallel_state.get_data_parallel_rank())
        return self.model(tokens, torch.arange(S).expand_as(tokens), None, labels=tokens).mean()

    def steps(self, *numbers):
        losses = []
        for number in numbers:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            loss = self.loss(number)
            loss.backward()
            finalize_model_grads([self.model])
            for p, where in self._fixed:
                p.main_grad[where] = 0
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    @property
    def codecs(self):
        """Storage formats of the second moments that this rank holds."""
        states = self.inner.state.values()
        return {piece.codec.name for s in states for piece in s["exp_avg_sq"].pieces}


def watched(folder):
    """Two data-parallel ranks with the distributed optimizer."""
    plain = Learner(False)
    assert plain.watch is None
    runs = {"plain": plain.steps(*range(5))}
    trainer = Learner({"every": 7, "folder": folder}).chain_anew()
    losses = trainer.steps(*range(5))
    # step 7 (number 6) is watched, and its reading is processed after step 8
    trainer.steps(5, 6, 7)
    last = trainer.watch.last
    trainer.watch.close()
    return runs | {"watched": losses, "last": last}


def states(folder):
    """The moments of all tensors fall back to FP32, through a limit that any error exceeds."""
    watch = {"every": 1, "act": "act", "update_error": 1e-6, "folder": folder}
    trainer = Learner(watch).chain_anew()
    before = trainer.codecs
    trainer.steps(*range(4))
    result = {"before": before, "after": trainer.codecs, "fallen": trainer.watch.fallback.state()}
    # Megatron-LM's default, with which each rank writes its own states
    trainer.save(f"{folder}/checkpoint", "dp_reshardable")
    early, of_torch = Learner(watch), Learner(watch)
    # a chain that is watched already has to work too
    early.watch = watch_optimizer(early.optimizer, WatchConfig(**watch))
    assert "coat_watch" not in of_torch.optimizer.state_dict(), "the layout is Megatron's"
    # the second reading above the limit is not processed yet
    early.steps(0, 1)
    of_torch.optimizer.load_state_dict(early.optimizer.state_dict())
    result["of --ckpt-format torch"] = of_torch.watch.fallback.state(), of_torch.codecs
    losses = trainer.steps(4, 5)
    again = Learner(watch).load(f"{folder}/checkpoint", "dp_reshardable")
    result["resumed"] = again.watch.fallback.state(), again.codecs
    result["equal"] = again.steps(4, 5) == losses
    again.watch.take_in()
    result["goes on at"] = again.watch.last.step
    again.watch.fallback.restore({})
    result["undone"] = again.codecs
    # a run with act "warn" restores no fallback
    other = Learner({"every": 1, "act": "warn"}).load(f"{folder}/checkpoint", "dp_reshardable")
    result["not taken"] = other.watch.fallback.state(), other.codecs
    return result


def outlier(folder, sizes):
    """Two tensor-parallel ranks with sequence parallelism: without the outlier, with it, and with the
    fallback."""
    watch = {"every": 1, "folder": folder}
    before, after = range(INJECTED), range(INJECTED, STEPS)
    result = {"none": Learner(False, **sizes).steps(*before, *after)}
    off = Learner(False, **sizes)
    result["off"] = off.steps(*before)
    off.inject()
    result["off"] += off.steps(*after)
    acting = watch | {"act": "act"}
    trainer = Learner(acting, **sizes)
    fallback, graphs = trainer.watch.fallback, trainer.model.module.decoder.layers[0].graphs
    graphs._places["recorded"] = Place(None)
    losses = trainer.steps(*before)
    result["early"] = fallback.state(), len(graphs._places)
    trainer.inject()
    result["act"] = losses + trainer.steps(*after)
    result |= {"fallen": fallback.state(), "last": trainer.watch.last, "graphs": len(graphs._places)}
    result["in fp8"] = [m._in_fp8 for m in trainer.model.modules() if hasattr(m, "_in_fp8")]
    trainer.save(f"{folder}/checkpoint", "fully_reshardable")
    more = trainer.steps(STEPS, STEPS + 1)
    again = Learner(acting, **sizes)
    again.load(f"{folder}/checkpoint", "fully_reshardable")
    linear = again.model.module.decoder.layers[0].mlp.linear_fc2
    result["resumed"] = again.watch.fallback.state(), linear.paused, linear.coat_part().why
    result["equal"] = again.steps(STEPS, STEPS + 1) == more
    again.watch.fallback.restore({})
    result["undone"] = linear.paused, linear._in_fp8
    # the same weights in FP8 and in BF16
    result["of the same"] = again.loss(0).item(), trainer.loss(0).item()
    # the names are the same at other sizes
    parallel_state.destroy_model_parallel()
    join()
    other = Learner(acting).load(f"{folder}/checkpoint", "fully_reshardable")
    result["elsewhere"] = other.watch.fallback.state()
    return result


def pipeline(folder):
    """Two pipeline stages of one layer each; each rank also has the other's readings."""
    watch = {"every": 1, "act": "act", "flushed": 0.0, "update_error": 1e9, "folder": folder}
    trainer = Learner(watch, readings=1)

    def forward_step(batches, model):
        tokens = next(batches)
        positions = torch.arange(S).expand_as(tokens)
        return model(tokens, positions, None, labels=tokens), lambda y: (y.mean(), {})

    for number in range(2):
        trainer.model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([Learner.tokens(number, 0)] * 2),
            model=trainer.model,
            num_microbatches=2,
            seq_length=S,
            micro_batch_size=4,
        )
        trainer.model.finish_grad_sync()
        trainer.optimizer.step()
    return trainer.watch.last.groups, sorted(trainer.watch._layers), trainer.watch.fallback.state()


class Mixture(Trainer):
    """Trains two experts, each on its own rank, on equal tokens, which all go to the same expert. One channel
    of the experts is so large that FP8 loses all other values."""

    def __init__(self, watch):
        watches(watch, readings=1)
        super().__init__("distributed", "coat", **(EXPERTS | EACH_ONE | ALL_TO_ALL | EP2))
        self.watch = self.optimizer.coat_watch
        (self.expert,) = self.model.module.decoder.layers[1].mlp.experts.local_experts
        with torch.no_grad():
            self.expert.linear_fc1.weight[3] *= FACTOR
        self.optimizer.reload_model_params()

    @staticmethod
    def tokens(number, rank):
        return torch.full((B, S), 7)

    @property
    def fallen(self):
        return self.watch.fallback.state(), self.expert.linear_fc2.paused


def experts(folder):
    """Two expert-parallel ranks with the alltoall dispatcher."""
    plain = Mixture(False).steps(0, 1)
    watched = Mixture({"every": 1, "folder": f"{folder}/watched"})
    result = {"plain": plain, "watched": watched.steps(0, 1)}
    result["busy"] = watched.expert.linear_fc1.weight.main_grad.any().item()
    watched.watch.close()
    result["last"] = watched.watch.last
    acting = {"every": 1, "act": "act"}
    trainer = Mixture(acting)
    trainer.steps(0, 1)
    trainer.save(f"{folder}/checkpoint", "fully_reshardable")
    again = Mixture(acting).load(f"{folder}/checkpoint", "fully_reshardable")
    result |= {"fallen": trainer.fallen, "resumed": again.fallen}
    return result | {"goes on": (trainer.steps(2, 3), again.steps(2, 3))}


def everything(folder):
    join()
    result = {}
    with cpu.no_cuda():
        result |= {"watched": watched(f"{folder}/watched"), "states": states(f"{folder}/states")}
        parallel_state.destroy_model_parallel()
        join(2)
        result["outlier"] = outlier(f"{folder}/outlier", {"sequence_parallel": True})
        parallel_state.destroy_model_parallel()
        join(pipeline_model_parallel_size=2)
        result["pipeline"] = pipeline(f"{folder}/pipeline")
        parallel_state.destroy_model_parallel()
        join(**EP2)
        result["experts"] = experts(f"{folder}/experts")
        parallel_state.destroy_model_parallel()
    return result


def under_deepspeed():
    """Losses under ZeRO-3 with whole layers as units, and the figures of a layer that has fallen back."""
    import deepspeed

    from coat_launch.model import parameter_groups

    cpu.enable()
    deepspeed.init_distributed("gloo")
    join()
    model = build_gpt(ModelShape(1, 64, FFN, 4, 2), coat_layer_spec, seq_length=S, vocab_size=64)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "coat": {"enabled": True, "watch": {"every": 1, "act": "act"}},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model), mpu=mpu, config=config
    )
    watch, losses, names = engine.coat.watch, [], ["decoder.layers.0.mlp.linear_fc1"]
    for step in range(6):
        if step in (2, 4):
            watch.fallback.restore({"layers": names if step == 2 else []})
        tokens = Learner.tokens(step, 0)
        loss = engine(tokens, torch.arange(S).expand_as(tokens), None, labels=tokens).mean()
        engine.backward(loss)
        engine.step()
        watch.take_in()
        counted = "decoder.layers.*.mlp.linear_fc1" in watch.last.groups
        losses.append((loss.item(), counted))
    return losses


def test_megatrons_layers_fall_back_under_deepspeed():
    (losses,) = run_distributed(under_deepspeed, 1)
    # in BF16 the layer has no codes
    assert [counted for _, counted in losses] == [True, True, False, False, True, True]
    assert losses[-1][0] < losses[0][0] - 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("watch"))


@pytest.fixture(scope="module")
def ranks(folder):
    return run_distributed(everything, 2, folder)


def test_readings_are_the_same_on_all_ranks_and_change_nothing(ranks, folder):
    first, second = (rank["watched"] for rank in ranks)
    assert first["plain"] == first["watched"] and second["plain"] == second["watched"]
    assert first["last"].groups == second["last"].groups and first["last"].step == 7
    groups = second["last"].groups
    states = groups["decoder.layers.*.mlp.linear_fc1.weight"]
    assert 1e-3 < states["update_error"] < 0.05 and states["underflowed"] == 0
    layer = groups["decoder.layers.*.self_attention.linear_qkv"]
    assert set(layer) >= {"input_flushed", "gradient_flushed", "input_saturated", "gradient_saturated"}
    assert groups["saved activations"]["saved_flushed"] < 0.05
    assert not any("other" in group or "_scale" in group for group in groups)
    assert read(f"{folder}/watched") == [second["last"]]


def test_states_go_to_fp32_and_come_back(ranks):
    for rank in ranks:
        found = rank["states"]
        assert found["before"] == {"fp32", "log8"} and found["after"] == {"fp32"}
        assert found["fallen"] == ranks[0]["states"]["fallen"] and found["fallen"]["layers"] == []
        assert "decoder.layers.1.mlp.linear_fc2.weight" in found["fallen"]["states"]
        assert found["resumed"] == (found["fallen"], {"fp32"}) and found["equal"]
        assert found["of --ckpt-format torch"] == found["resumed"]
        assert found["goes on at"] == 6
        assert found["undone"] == found["before"]
        assert found["not taken"] == (NOTHING, found["before"])


def test_an_outlier_is_seen_and_the_run_is_saved(ranks):
    for rank in ranks:
        found = rank["outlier"]
        fallen = found["fallen"]
        assert fallen == {
            "layers": [f"decoder.layers.{i}.mlp.linear_fc{j}" for i in (0, 1) for j in (1, 2)],
            "states": [],
        }
        assert found["last"].fallen == fallen["layers"] and found["in fp8"].count(False) == 4
        assert found["early"] == (NOTHING, 1) and found["graphs"] == 0, (
            "they replay what the layer did before"
        )
        # the second reading above the limit is of the second step with the outlier, and is processed after
        # the third
        assert found["act"][: INJECTED + 3] == found["off"][: INJECTED + 3]
        lost = {how: sum(found[how][-6:]) - sum(found["none"][-6:]) for how in ("off", "act")}
        # the other part was lost in these three steps
        assert lost["off"] > 0.5 and lost["act"] < 0.6 * lost["off"], lost
        in_fp8, in_bf16 = found["of the same"]
        assert in_fp8 > in_bf16 + 0.1


def test_the_checkpoint_remembers_and_the_way_back(ranks):
    for rank in ranks:
        found = rank["outlier"]
        assert found["resumed"] == (found["fallen"], True, "fallen back, by coat.watch") and found["equal"]
        assert found["undone"] == (False, True)
        assert found["elsewhere"] == found["fallen"]


def test_stages_of_a_pipeline_agree(ranks):
    (first, layers, fallen), second = (rank["pipeline"] for rank in ranks)
    assert second == (first, layers, fallen)
    assert {f"decoder.layers.{i}.mlp.linear_fc2" for i in range(2)} <= set(layers)
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= set(first)
    # layers of both stages
    assert {name.split(".")[2] for name in fallen["layers"]} == {"0", "1"}


def test_experts_of_one_number_fall_back_on_all_ranks(ranks):
    first, second = (rank["experts"] for rank in ranks)
    # one rank's expert has no tokens
    assert sorted((first["busy"], second["busy"])) == [False, True]
    name = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2"
    for found in (first, second):
        assert found["plain"] == found["watched"]
        assert found["last"].groups == first["last"].groups
        group = found["last"].groups["decoder.layers.*.mlp.experts.local_experts.*.linear_fc2"]
        assert group["input_flushed"] > 0.9
        assert found["fallen"] == (first["fallen"][0], True) and name in found["fallen"][0]["layers"]
        assert found["resumed"] == found["fallen"]
        assert found["goes on"][0] == found["goes on"][1]
