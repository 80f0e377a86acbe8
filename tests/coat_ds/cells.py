"""A small model under every way in which DeepSpeed drives the optimizer, and bounds of its losses."""

import deepspeed
import torch
from torch import nn

from tests.hosts import TEST_ALL

BATCH, STEPS, LR = 8, 5, 2e-3
# FP8 E4M3 rounds by 2^-4 at most, stretched groups by less, up as often as down: 2^-4 / sqrt(3) in the mean
# square. To first order what the loss falls by is a sum over elements, in which the errors average out: four
# deviations of 100 elements' mean, of 20,000, are 0.0145. The first two losses follow from FP32 moments.
FP8_BOUND = 2**-6
# of a loss: a mean over values that 16 bits round by up to 2^-9 each, up as often as down; in FP32 sums have
# other orders
TOLERANCE = {"bf16": 2**-10, "fp16": 2**-10, "autocast": 2**-10, "fp32": 1e-5}


class Tied(nn.Module):
    """Odd shapes, one weight used twice, a frozen one, norms and biases."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(47, 131, bias=False)
        self.frozen = nn.Linear(131, 131).requires_grad_(False)
        self.inner = nn.Linear(131, 61)
        self.norm = nn.LayerNorm(61)
        self.out = nn.Linear(61, 131)

    def forward(self, x):
        x = self.frozen(self.embed(x)).relu()
        return self.out(self.norm(self.inner(x))) @ self.embed.weight


class Wide(nn.Sequential):
    """Weights of whole groups, on either of two ranks too."""

    def __init__(self):
        super().__init__(nn.Linear(47, 512, bias=False), nn.ReLU(), nn.Linear(512, 47, bias=False))


class Experts(nn.Module):
    def __init__(self):
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.first = nn.Linear(47, 64)
        expert = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
        # every token meets every expert: no random choice, nothing dropped
        self.moe = MoE(
            64, expert, num_experts=2, k=2, capacity_factor=4, use_rts=False, top2_2nd_expert_sampling=False
        )
        self.last = nn.Linear(64, 47)

    def forward(self, x):
        return self.last(self.moe(self.first(x).relu())[0])


def decay_groups(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": LR / 2},
    ]


def cell(
    stage, dtype="bf16", *, model=Tied, groups=None, clip=1.0, accumulation=1, zero=(), section=(), sums=None
):
    return dict(
        stage=stage, dtype=dtype, model=model, groups=groups, clip=clip, accumulation=accumulation,
        zero=dict(zero), section=dict(section), sums=sums,
    )  # fmt: skip


MASTER16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# each option meets each stage's kind of partition, and each type each kind
CELLS = {
    **{f"bf16-{stage}": cell(stage) for stage in range(4)},
    **{f"fp32-{stage}": cell(stage, "fp32") for stage in (0, 1, 3)},
    **{f"fp16-{stage}": cell(stage, "fp16") for stage in (0, 2, 3)},
    **{f"accumulation-{stage}": cell(stage, accumulation=2) for stage in (1, 2)},
    **{f"groups-{stage}": cell(stage, groups=decay_groups) for stage in (0, 2)},
    **{f"master32-{stage}": cell(stage, model=Wide, clip=0.0) for stage in (1, 3)},
    **{f"master16-{stage}": cell(stage, model=Wide, clip=0.0, section=MASTER16) for stage in (1, 3)},
    "offload-2": cell(2, zero=OFFLOAD),
    # DeepSpeed's autocast, of FP32 weights; micro-batches summed in FP32, in stage 1 by its BF16_Optimizer
    **{f"autocast-{stage}": cell(stage, "autocast", accumulation=2) for stage in (1, 3)},
    **{f"summed32-{stage}": cell(stage, accumulation=2, sums="fp32") for stage in (1, 2, 3)},
    "subgroups-3": cell(3, zero={"sub_group_size": 5000}),
    "round-robin-2": cell(2, zero={"round_robin_gradients": True}),
    # DeepSpeed makes their parameter groups
    "experts-2": cell(2, "fp32", model=Experts),
}
if not TEST_ALL:
    # other stages have these options, and these stages others
    for name in ("fp32-1", "fp16-2", "accumulation-1", "groups-0", "summed32-2", "round-robin-2"):
        del CELLS[name]


def ds_config(cell, coat=True):
    section = {"enabled": True, **cell["section"]}
    if cell["dtype"] == "fp16":
        section["initial_scale_power"] = 8
    precision = {cell["dtype"]: section}
    if cell["dtype"] == "autocast":
        precision = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    params = {"lr": LR, "weight_decay": 0.1, "betas": [0.9, 0.95]}
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": cell["accumulation"],
        "gradient_clipping": cell["clip"],
        # DeepSpeed allocates a gigabyte for the gradients of each engine unless told
        "zero_optimization": {"stage": cell["stage"], "reduce_bucket_size": 10**6, **cell["zero"]},
        "optimizer": {"type": "AdamW", "params": params if coat else {**params, "torch_adam": True}},
        "data_types": {"grad_accum_dtype": cell["sums"]},
        **({} if cell["dtype"] == "fp32" else precision),
        **(
            {"coat": {"enabled": True, "activations": False, "optimizer": {"min_numel": 1000}}}
            if coat
            else {}
        ),
    }


def start(cell, coat=True):
    torch.manual_seed(0)
    model = cell["model"]()
    groups = cell["groups"] and cell["groups"](model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=ds_config(cell, coat))
    return engine


def train_step(engine, factor=1.0):
    """One step on this rank's share of the batch, which is the same every time; the whole batch's loss."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(BATCH, 47, generator=generator).to(engine.device) for _ in range(2))
    parts = engine.gradient_accumulation_steps()
    total = torch.zeros((), device=engine.device)
    for i in range(parts):
        share = slice(rank * parts + i, None, world * parts)
        dtype = next(engine.module.parameters()).dtype
        loss = (engine(x[share].to(dtype)).float() - y[share]).square().mean()
        engine.backward(loss * factor)
        engine.step()
        total += loss.detach() / parts
    torch.distributed.all_reduce(total)
    return total.item() / world


def run_stock(cell, known):
    """Losses of stock AdamW, which are the same at stages 1, 2 and 3."""
    cell = {**cell, "stage": min(cell["stage"], 1), "zero": {}, "section": {}}
    if str(cell) not in known:
        engine = start(cell, coat=False)
        known[str(cell)] = [train_step(engine) for _ in range(STEPS)]
    return known[str(cell)]
