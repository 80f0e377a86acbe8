"""Models whose experts transformers has spread over ranks (`ep_size`), converted, in two processes."""

import warnings

import pytest
import torch
import torch.distributed as dist

import coat_ds
from tests.coat_ds.layers.measures import fp8_bound, relative, run
from tests.coat_ds.layers.parts import whole
from tests.families import FAMILIES
from tests.util import backend, on_gpus, run_distributed

parallel = pytest.importorskip("transformers.distributed.expert_parallel")
if not hasattr(parallel, "EPImplementation"):
    pytest.skip("transformers before 5.23", allow_module_level=True)
# all experts for each token, so that no rounding chooses others
QWEN3 = FAMILIES["qwen3_moe"]
BUILD = {"num_experts_per_tok": 4}
EXPERTS = [f"model.layers.{i}.mlp.experts" for i in range(2)]


def load(path, implementation="auto"):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    sizes = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation=implementation)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, distributed_config=sizes).train()


def trained(model, batch, optimizer):
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ranks(path, device):
    """Losses and gradients of the model alone, spread over ranks, and spread and converted; losses of
    training, stock and with COAT, and of the saved model."""
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    dist.init_process_group(backend(device))
    batch = {name: value.to(device) for name, value in QWEN3.batch().items()}
    found = [run(QWEN3.build(**BUILD).to(device), batch)]
    for converts in (False, True):
        model = load(path)
        if converts:
            coat_ds.convert(model)
        loss, gradients = run(model, batch)
        found.append((loss, whole(gradients)))
    conversion = coat_ds.conversion_of(model)
    with torch.no_grad():
        evaluated = model(**batch).loss.item()
    coat_ds.unconvert(model)
    unconverted = model(**batch).loss.item()
    # the parameters of a model that has just evaluated are not those that FSDP2 trains
    model = load(path)
    stock = trained(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3))
    model = coat_ds.convert(load(path))
    ours = trained(model, batch, coat_ds.CoatAdamW(model.named_parameters(), lr=1e-3))
    after = model(**batch).loss.item()
    model.save_pretrained(f"{path}/saved")
    dist.barrier()
    alone = AutoModelForCausalLM.from_pretrained(f"{path}/saved", dtype=torch.bfloat16).train().to(device)
    saved = coat_ds.convert(alone)(**batch).loss.item()
    return found, conversion, (evaluated, unconverted), (stock, ours), (after, saved)


def check(results, path):
    from safetensors import safe_open

    for found, conversion, (evaluated, unconverted), (stock, ours), (after, saved) in results:
        (loss, expected), (spread, _), (fp8, gradients) = found
        assert conversion.converted["feed_forward"] == EXPERTS
        assert spread == unconverted != fp8 and abs(fp8 - loss) < 2**-8 * loss
        # a layer has 4 linear layers of attention and 2 of experts
        assert 2**-6 < relative(gradients, expected) < fp8_bound(12)
        assert evaluated == pytest.approx(fp8, rel=2**-9)
        # FP8 changes a logit by less than 2^-4 of itself, and a loss by less of its fall
        assert stock[-1] < 0.9 * stock[0] and ours == pytest.approx(stock, abs=2**-4 * (stock[0] - stock[-1]))
        # one process adds rows of experts in another order, in BF16
        assert saved == pytest.approx(after, rel=2**-9)
    with (
        safe_open(path / "model.safetensors", "pt") as before,
        safe_open(path / "saved" / "model.safetensors", "pt") as after,
    ):
        assert set(before.keys()) == set(after.keys())


def test_transformers_ep_trains_and_saves_on_two_ranks(tmp_path):
    QWEN3.build(**BUILD).save_pretrained(tmp_path)
    check(run_distributed(ranks, 2, str(tmp_path), "cpu"), tmp_path)


@on_gpus(2)
def test_transformers_ep_trains_and_saves_on_two_gpus(tmp_path):
    QWEN3.build(**BUILD).save_pretrained(tmp_path)
    check(run_distributed(ranks, 2, str(tmp_path), "cuda", gpus=True), tmp_path)


def left(path):
    from transformers.distributed import expert_parallel

    class Other(expert_parallel.AllToAllEP):
        pass

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    expert_parallel.EPImplementationInterface.register("other", Other)
    return coat_ds.conversion_of(coat_ds.convert(load(path, "other"))).left


def test_transformers_ep_of_another_implementation_stays(tmp_path):
    QWEN3.build(**BUILD).save_pretrained(tmp_path)
    for reasons in run_distributed(left, 2, str(tmp_path)):
        for name in EXPERTS:
            assert reasons[name] == "transformers' Other calls it, not ep_implementation 'all_to_all'"
