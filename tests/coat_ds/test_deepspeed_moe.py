"""DeepSpeed's MoE in 2 processes with one expert each: FP8 layers and 8-bit states in ZeRO-2, no ZeRO-3."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.coat_ds import engines
from tests.coat_ds.engines import adamw
from tests.util import backend, on_gpus, run_distributed

H, TOKENS, STEPS = 64, 32, 4


class Experts(nn.Module):
    def __init__(self):
        from deepspeed.moe.layer import MoE

        super().__init__()
        expert = nn.Sequential(nn.Linear(H, 2 * H), nn.SiLU(), nn.Linear(2 * H, H))
        # every token meets every expert: FP8 rounding changes no route
        options = {"k": 2, "capacity_factor": 4, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.first = nn.Linear(H, H)
        self.moe = MoE(H, expert, num_experts=2, ep_size=2, **options)
        self.last = nn.Linear(H, H)

    def forward(self, x):
        return self.last(self.moe(self.first(x).relu())[0])


def engine_of(stage: int, coat: bool, device: str):
    torch.manual_seed(0)
    return engines.engine_of(
        Experts().to(device),
        stage,
        {"enabled": coat},
        optimizer=adamw(1e-2),
        train_micro_batch_size_per_gpu=TOKENS,
    )


def trained(stage: int, coat: bool, device: str) -> tuple[list[float], str]:
    engine, losses = engine_of(stage, coat, device), []
    x = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16().to(device)
    for _ in range(STEPS):
        loss = (engine(x) - x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, str(getattr(engine, "coat", ""))


def work(device: str) -> dict:
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.init_distributed(backend(device))
    for coat in (False, True):
        with pytest.raises(AssertionError, match="not supported with (ZeRO )?Stage 3"):
            engine_of(3, coat, device)
    return {"stock": trained(2, False, device), "COAT": trained(2, True, device)}


def check(results) -> None:
    for rank in results:
        (stock, _), (ours, said) = rank["stock"], rank["COAT"]
        # the router has 2 outputs and stays in BF16
        assert "4 of 5 linear layers in FP8" in said and "in log8" in said
        # an operand is off by at most 2^-4 of itself in E4M3, the loss by less of its fall
        fall = stock[0] - stock[-1]
        assert fall > 0.05 * stock[0]
        assert ours == pytest.approx(stock, abs=2**-4 * fall)


def test_deepspeed_moe_trains_in_fp8_under_zero2_alone():
    check(run_distributed(work, 2, "cpu"))


@on_gpus(2)
def test_deepspeed_moe_trains_in_fp8_under_zero2_alone_on_two_gpus():
    check(run_distributed(work, 2, "cuda", gpus=True))
