"""What is trained end to end: models of 7 to 13 billion parameters, over GPUs, by one system or another."""

import os
from typing import NamedTuple

import torch

from benchmarks.common.environment import device
from benchmarks.common.shapes import LAYERS, LayerShape
from benchmarks.common.spawn import Rank, join_deepspeed
from benchmarks.common.training import BETAS, loss_of
from coat_ds import plan
from coat_ds.config import CoatConfig
from coat_ds.plan.systems import FASTEST
from coat_launch.batches import Batch

# different batches, so that scales predicted from the last pass are not always right
BATCHES = 4
BUCKET = 100_000_000


class Model(NamedTuple):
    """Sizes of a Llama-like model; the layer's batch is the micro-batch at which all systems are compared."""

    layer: LayerShape
    layers: int
    vocabulary: int
    rotary_base: int = 10000

    def sizes(self, layers: int) -> plan.Sizes:
        """With so many layers."""
        return self.layer.sizes(layers, self.vocabulary)

    def flops(self, layers: int, micro_batch: int) -> float:
        """FLOPs of forward and backward; attention's are halved by causality, recompute is not counted."""
        return plan.flops(self.sizes(layers), micro_batch, self.layer.sequence)


MODELS = {
    "llama2-7b": Model(LAYERS["llama-2-7b"], 32, 32000),
    "llama3-8b": Model(LAYERS["llama-3-8b"], 32, 128256, 500000),
    "llama2-13b": Model(LayerShape(5120, 13824, 40, 40, batch=2, sequence=2048), 40, 32000),
    # of the paper's rows that no other has
    "llama2-13b-1k": Model(LayerShape(5120, 13824, 40, 40, batch=1, sequence=1024), 40, 32000),
    "llama-30b": Model(LayerShape(6656, 17920, 52, 52, batch=1, sequence=2048), 60, 32000),
    "tiny": Model(LayerShape(64, 128, 4, 2, batch=2, sequence=64), 2, 512),
}


class Way(NamedTuple):
    """How a model is spread over GPUs; tensor parallelism comes with sequence parallelism."""

    stage: int
    tensor: int = 1


WAYS = {
    "zero1": Way(1),
    "zero2": Way(2),
    "zero3": Way(3),
    "tp2": Way(1, 2),
    "tp4": Way(1, 4),
    "tp4_zero2": Way(2, 4),
}


class System(NamedTuple):
    """Layers and optimizer."""

    coat: dict | None = None
    """The block; without it Megatron's own layers and torch's fused AdamW."""
    config: dict = {}
    """Further fields of Megatron's TransformerConfig."""
    package: str | None = None
    """Without which there is none."""
    fp8_moments: bool = False
    """TransformerEngine's AdamW as Megatron's precision-aware optimizer sets it up, both moments in FP8."""
    bf16_masters: bool = False
    """DeepSpeed keeps masters and gradients in BF16."""
    layer_units: bool | None = None
    """Of ZeRO-3, as the block has it; true also without COAT's layers and optimizer."""
    zero: dict = {}
    """Further keys of `zero_optimization`."""
    asked_for: bool = False
    """Whether it is measured by its name only."""

    def planned(self) -> plan.System:
        """As `coat plan` knows it."""
        layers = "bf16" if self.coat is None else "coat"
        return plan.System(
            name="",
            layers="transformer_engine" if self.package else layers,
            optimizer="transformer_engine" if self.fp8_moments else {"bf16": "adamw"}.get(layers, layers),
            coat=CoatConfig.from_dict(
                {"enabled": True, "zero3_layer_units": self.layer_units, **(self.coat or {})}
            ),
            bf16_masters=self.bf16_masters,
            recompute="mlp" if "recompute_modules" in self.config else "none",
        )


_TE = {"config": {"fp8": "hybrid", "fp8_recipe": "delayed"}, "package": "transformer_engine"}
SYSTEMS = {
    "BF16": System(),
    "BF16, MLP recomputed": System(
        config={"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    ),
    "TE FP8": System(**_TE),
    "TE FP8, FP8 moments": System(**_TE, fp8_moments=True),
    "COAT": System({}),
    "COAT, fastest": System({"activations": FASTEST}),
    "COAT, 8-bit attention": System({"activations": {"attention_format": "sqrt8"}}),
    "COAT, recomputed attention": System({"activations": {"attention_format": "recompute"}}),
    "COAT, smallest": System(
        {"activations": {"attention_format": "sqrt8"}, "optimizer": {"bf16_params": "stochastic"}},
        bf16_masters=True,
    ),
    "COAT, smallest, recomputed attention": System(
        {"activations": {"attention_format": "recompute"}, "optimizer": {"bf16_params": "stochastic"}},
        bf16_masters=True,
    ),
    "BF16, layers as units": System(layer_units=True, asked_for=True),
    "TE FP8, layers as units": System(**_TE, layer_units=True, asked_for=True),
    "COAT, module by module": System({}, layer_units=False, asked_for=True),
    "COAT, quantized gathers": System({}, zero={"zero_quantized_weights": True}, asked_for=True),
    "COAT, graphs": System({"activations": {"cuda_graphs": True}}, asked_for=True),
    "COAT, no graphs": System({"activations": {"cuda_graphs": False}}, asked_for=True),
}
BY_DEFAULT = [name for name, system in SYSTEMS.items() if not system.asked_for]
BF16_MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


class Job(NamedTuple):
    """One system in one way; several rows."""

    model: str
    way: str
    system: str
    layers: int
    micro_batch: int
    """At which all systems are compared."""

    @property
    def key(self) -> tuple:
        return (self.model, self.way, self.system, self.layers)


def planned(
    model: Model, layers: int, way: Way, gpus: int, system: System, micro_batch: int
) -> tuple[plan.Sizes, plan.Layout, plan.System]:
    """What is trained, as `coat plan` takes it."""
    layout = plan.Layout(
        micro_batch=micro_batch,
        sequence=model.layer.sequence,
        gpus=gpus,
        stage=way.stage,
        tensor=way.tensor,
        reduce_bucket=BUCKET,
    )
    return model.sizes(layers), layout, system.planned()


def predict(
    model: Model, layers: int, way: Way, gpus: int, system: System, micro_batch: int
) -> plan.Prediction:
    """Bytes of a step on the fullest GPU."""
    return plan.predict(*planned(model, layers, way, gpus, system, micro_batch))


def predicted_columns(found: plan.Prediction) -> dict[str, float]:
    """Columns of a table, in 10^6 bytes: the most that each role takes, and the peak of all."""
    most = {
        f"{role}_predicted_mb": max(getattr(moment, role) for moment in found.moments) / 1e6
        for role in plan.ROLES
    }
    return most | {"all_predicted_mb": found.peak.total / 1e6}


def bf16_section(system: System) -> dict:
    """Of the DeepSpeed JSON."""
    return {"enabled": True, **(BF16_MASTERS if system.bf16_masters else {})}


def coat_section(system: System) -> dict:
    """Of the DeepSpeed JSON."""
    block = {"enabled": True}
    if system.layer_units is not None:
        block["zero3_layer_units"] = system.layer_units
    if system.coat is not None:
        return block | system.coat
    if system.layer_units is True:
        return block | {"optimizer": {"enabled": False}, "activations": {"enabled": False}}
    return {"enabled": False}


def deepspeed_config(job: Job, micro_batch: int) -> dict:
    """The DeepSpeed JSON."""
    system = SYSTEMS[job.system]
    params = {"lr": 1e-4, "betas": list(BETAS), "weight_decay": 0.1}
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": bf16_section(system),
        "zero_optimization": {
            "stage": WAYS[job.way].stage,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            **system.zero,
        },
        "optimizer": {"type": "AdamW", "params": params},
        "coat": coat_section(system),
    }
    if system.fp8_moments:
        del config["optimizer"]
        config["zero_allow_untested_optimizer"] = True
    elif system.coat is None:
        params.update(torch_adam=True, fused=True)
    return config


def start(place: Rank, way: str) -> None:
    """Makes this process one of its ranks, as the way has it."""
    # for the overlap of Megatron's collectives with GEMMs; ZeRO's would wait for kernels
    if WAYS[way].tensor > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # nothing fails for holes in memory
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    join_deepspeed(place)
    from megatron_ext import cpu
    from megatron_ext.model import initialize_model_parallel

    cpu.enable()
    initialize_model_parallel(WAYS[way].tensor)


def build_model(job: Job) -> torch.nn.Module:
    """Megatron's GPTModel on this rank's device, with random weights that are drawn there."""
    from megatron_ext import layer_specs
    from megatron_ext.model import ModelShape, build_gpt

    system, model = SYSTEMS[job.system], MODELS[job.model]
    if system.package:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        spec = get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = layer_specs.sdpa_layer_spec if system.coat is None else layer_specs.coat_layer_spec
    x = model.layer
    gpt = build_gpt(
        ModelShape(job.layers, x.hidden, x.ffn, x.heads, x.groups, model.rotary_base),
        spec,
        seq_length=x.sequence,
        vocab_size=model.vocabulary,
        activations=CoatConfig.from_dict({"enabled": True, **(system.coat or {})}).activations,
        # billions of weights take a CPU minutes
        use_cpu_initialization=False,
        perform_initialization=False,
        sequence_parallel=WAYS[job.way].tensor > 1,
        **system.config,
    )
    generator = torch.Generator(device()).manual_seed(0)
    with torch.no_grad():
        for p in gpt.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.02, generator=generator)
    return gpt


def build_engine(job: Job, micro_batch: int, model: torch.nn.Module):
    import deepspeed

    import coat_ds
    from coat_launch.model import parameter_groups
    from megatron_ext import mpu

    groups, optimizer = parameter_groups(model), None
    if SYSTEMS[job.system].fp8_moments:
        from transformer_engine.pytorch.optimizers import FusedAdam

        optimizer = FusedAdam(
            groups,
            lr=1e-4,
            betas=BETAS,
            weight_decay=0.1,
            exp_avg_dtype=torch.uint8,
            exp_avg_sq_dtype=torch.uint8,
        )
    mpu.sum_shared_gradients(model)
    coat_ds.install()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=None if optimizer else groups,
        mpu=mpu,
        config=deepspeed_config(job, micro_batch),
    )
    return engine


def random_batches(job: Job, micro_batch: int) -> list[Batch]:
    """Random tokens, the same on ranks that share a model; `BATCHES` of them."""
    from megatron_ext import mpu

    model = MODELS[job.model]
    generator = torch.Generator().manual_seed(mpu.get_data_parallel_rank())
    sizes = (micro_batch, model.layer.sequence + 1)
    made = []
    for _ in range(BATCHES):
        tokens = torch.randint(model.vocabulary, sizes, generator=generator).to(device())
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(model.layer.sequence, device=device()).expand_as(inputs)
        made.append(Batch(inputs, labels, torch.ones_like(inputs), positions))
    return made


def masters_of(engine) -> list[torch.Tensor]:
    """ZeRO's FP32 copies of the weights on this rank."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return optimizer.fp32_partitioned_groups_flat
    return optimizer.single_partition_of_fp32_groups


def forward(engine, batch: Batch) -> torch.Tensor:
    """The loss of a micro-batch that begins a step."""
    # as Megatron's loop does: TransformerEngine keeps its FP8 weights until then
    engine.module.set_is_first_microbatch()
    return loss_of(engine, batch)


def train_step(engine, batch: Batch) -> torch.Tensor:
    """The loss before a step of one micro-batch."""
    loss = forward(engine, batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()
