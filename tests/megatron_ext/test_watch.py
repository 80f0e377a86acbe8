"""Megatron's training watched: readings, which are the same on all ranks.

One spawn of two processes serves most tests.
"""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from coat_ds.config import CoatConfig, WatchConfig
from coat_ds.watch.readings import read
from megatron_ext import cpu
from megatron_ext.optimizer import patches
from megatron_ext.optimizer.watch import watch_optimizer
from tests.megatron_ext.experts import ALL_TO_ALL, EACH_ONE, EXPERTS
from tests.megatron_ext.layers import loss_of
from tests.megatron_ext.ranks import join
from tests.megatron_ext.trainer import FFN, B, S, Trainer
from tests.util import run_distributed

pytestmark = pytest.mark.early

# an outlier feature, so large that FP8 loses all other values
FACTOR = 2.0**20
EP2 = {"expert_model_parallel_size": 2}


def watches(watch):
    """Later optimizers are built with this block of the watch."""
    block = {"enabled": True, "optimizer": {"min_numel": 0}, "watch": watch}
    patches.uninstall()
    patches.install(CoatConfig.from_dict(block))


class Learner(Trainer):
    """Trains on learnable data."""

    def __init__(self, watch, **options):
        watches(watch)
        super().__init__("distributed", "coat", **options)
        self.watch = self.optimizer.coat_watch
        for group in self.inner.param_groups:
            group["lr"] = 5e-3

    def chain_anew(self):
        """Builds a new chain, as Megatron does with Muon."""
        self.optimizer = ChainedOptimizer(self.optimizer.chained_optimizers)
        self.watch = self.optimizer.coat_watch
        return self

    def inject(self):
        """Makes one channel of the input of each fc2 an outlier; in BF16 the model's output is unchanged."""
        up = FFN // parallel_state.get_tensor_model_parallel_world_size() + 3
        for layer in self.model.module.decoder.layers:
            with torch.no_grad():
                layer.mlp.linear_fc1.weight[up] *= FACTOR
                layer.mlp.linear_fc2.weight[:, 3] /= FACTOR
        self.optimizer.reload_model_params()

    @staticmethod
    def tokens(number, rank):
        return (torch.arange(S) * (1 + number % 3) + 8 * torch.arange(4)[:, None] + 32 * rank) % 64

    def loss(self, number):
        tokens = self.tokens(number, parallel_state.get_data_parallel_rank())
        return loss_of(self.model, tokens)

    def steps(self, *numbers):
        losses = []
        for number in numbers:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            loss = self.loss(number)
            loss.backward()
            finalize_model_grads([self.model])
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def watched(folder):
    """Two data-parallel ranks with the distributed optimizer."""
    plain = Learner(False)
    assert plain.watch is None
    runs = {"plain": plain.steps(*range(5))}
    trainer = Learner({"every": 7, "folder": folder}).chain_anew()
    losses = trainer.steps(*range(5))
    # step 7 (number 6) is watched, and its reading is written after step 8, or before a checkpoint
    trainer.steps(5, 6)
    assert trainer.watch.last is None
    trainer._sharded("dp_reshardable")
    last = trainer.watch.last
    trainer.watch.close()
    return runs | {"watched": losses, "last": last}


def outlier(folder):
    """The last reading of two tensor-parallel ranks with sequence parallelism, with the outlier."""
    trainer = Learner({"every": 1, "folder": folder}, sequence_parallel=True)
    # a chain that is watched already
    trainer.watch = watch_optimizer(trainer.optimizer, WatchConfig(every=1, folder=folder))
    trainer.inject()
    trainer.steps(0)
    assert trainer.watch.last is None
    # a checkpoint of Megatron's older format
    trainer.optimizer.state_dict()
    last = trainer.watch.last
    trainer.watch.close()
    return last


def pipeline(folder):
    """Two pipeline stages of one layer each; each rank also has the other's readings."""
    trainer = Learner({"every": 1, "folder": folder})

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
    return trainer.watch.last.groups, sorted(trainer.watch._layers)


class Mixture(Trainer):
    """Trains two experts, each on its own rank, on equal tokens, which all go to the same expert. One channel
    of the experts is so large that FP8 loses all other values."""

    def __init__(self, watch, grouped):
        watches(watch)
        config = EXPERTS | EACH_ONE | ALL_TO_ALL | EP2
        super().__init__("distributed", "coat", **config, moe_grouped_gemm=grouped)
        self.watch = self.optimizer.coat_watch
        experts = self.model.module.decoder.layers[1].mlp.experts
        (self.expert,) = [experts] if grouped else experts.local_experts
        with torch.no_grad():
            self.expert.linear_fc1.weight[..., 3, :] *= FACTOR
        self.optimizer.reload_model_params()

    @staticmethod
    def tokens(number, rank):
        return torch.full((B, S), 7)


def experts(folder, grouped):
    """Two expert-parallel ranks with the alltoall dispatcher."""
    plain = Mixture(False, grouped).steps(0, 1)
    watched = Mixture({"every": 1, "folder": f"{folder}/watched"}, grouped)
    result = {"plain": plain, "watched": watched.steps(0, 1)}
    result["busy"] = watched.expert.linear_fc1.weight.main_grad.any().item()
    watched.watch.close()
    return result | {"last": watched.watch.last}


def everything(folder):
    join()
    result = {}
    with cpu.no_cuda():
        result["watched"] = watched(f"{folder}/watched")
        parallel_state.destroy_model_parallel()
        join(2)
        result["outlier"] = outlier(f"{folder}/outlier")
        parallel_state.destroy_model_parallel()
        join(pipeline_model_parallel_size=2)
        result["pipeline"] = pipeline(f"{folder}/pipeline")
        parallel_state.destroy_model_parallel()
        join(**EP2)
        for grouped in (False, True):
            result["experts", grouped] = experts(f"{folder}/experts {grouped}", grouped)
        parallel_state.destroy_model_parallel()
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("watch"))


@pytest.fixture(scope="module")
def ranks(folder):
    return run_distributed(everything, 2, folder)


def test_watch_readings_are_the_same_on_all_ranks_and_change_nothing(ranks, folder):
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


def test_watch_finds_an_outlier(ranks):
    for rank in ranks:
        group = rank["outlier"].groups["decoder.layers.*.mlp.linear_fc2"]
        assert group["input_flushed"] > 0.9


def test_watch_of_pipeline_stages(ranks):
    (first, layers), second = (rank["pipeline"] for rank in ranks)
    assert second == (first, layers)
    assert {f"decoder.layers.{i}.mlp.linear_fc2" for i in range(2)} <= set(layers)
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= set(first)


@pytest.mark.parametrize(
    "grouped, fc2", [(False, "local_experts.*.linear_fc2"), (True, "down")], ids=["sequential", "grouped"]
)
def test_watch_of_experts_has_the_same_figures_on_all_ranks(ranks, grouped, fc2):
    first, second = (rank["experts", grouped] for rank in ranks)
    # one rank's expert has no tokens
    assert sorted((first["busy"], second["busy"])) == [False, True]
    for found in (first, second):
        assert found["plain"] == found["watched"]
        assert found["last"].groups == first["last"].groups
        group = found["last"].groups[f"decoder.layers.*.mlp.experts.{fc2}"]
        assert group["input_flushed"] > 0.9 and group["gradient_flushed"] < 1
