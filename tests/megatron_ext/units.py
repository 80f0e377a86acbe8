"""Engines of ZeRO-3 whose units are layers, and those without units."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from coat_ds.config import ActivationsConfig
from tests.families import FAMILIES
from tests.megatron_ext.hybrid import EXPERTS, hybrid_of
from tests.megatron_ext.layers import loss_of

S, B, VOCAB, LAYERS = 32, 2, 64, 2
# of these models, only norms stay gathered
GATHERED = {"stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 0}
ONE_FOR_ALL = {
    **{**EXPERTS, "moe_layer_freq": [0, 1]},
    **{"moe_router_topk": 1, "moe_router_pre_softmax": True},
}
GROUPED = ONE_FOR_ALL | {"moe_grouped_gemm": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def gpt(coat: bool = True, tied: bool = False, layers: int = LAYERS, **config) -> nn.Module:
    from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec
    from megatron_ext.model import ModelShape, build_gpt

    spec = coat_layer_spec if coat else sdpa_layer_spec
    shape = ModelShape(layers, 64, 128, 4, 2, untie_embeddings_and_output_weights=not tied)
    return build_gpt(shape, spec, seq_length=S, vocab_size=VOCAB, **config)


def _stack() -> nn.Module:
    from megatron_ext.hybrid_specs import coat_hybrid_stack_spec

    return hybrid_of("*-*E", gpt(**EXPERTS), coat_hybrid_stack_spec)


class Checkpointed(nn.Module):
    """A layer that is called within `checkpoint(function, x)`."""

    def __init__(self, layer, checkpoint):
        super().__init__()
        self.layer, self.checkpoint = layer, checkpoint

    def forward(self, hidden_states, **kwargs):
        return self.checkpoint(lambda x: self.layer(hidden_states=x, **kwargs)[0], hidden_states), None


def _checkpointed(checkpoint) -> nn.Module:
    model = gpt()
    for i, layer in enumerate(model.decoder.layers):
        model.decoder.layers[i] = Checkpointed(layer, checkpoint)
    return model


def _by_torch(function, x, use_reentrant=True):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, x, use_reentrant=use_reentrant)


def _by_deepspeed(function, x):
    from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

    return checkpoint(function, x)


def _freeze(model: nn.Module, part: str, trains: bool = False) -> nn.Module:
    model.get_submodule(part).requires_grad_(trains)
    return model


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": VOCAB, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)).bfloat16()


def _tokens(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randint(0, VOCAB, (B, S), generator=generator)


def _once(engine, step: int) -> torch.Tensor:
    return loss_of(engine, _tokens(step))


def _twice(engine, step: int) -> torch.Tensor:
    return loss_of(engine, _tokens(step)) + loss_of(engine, _tokens(step + 7))


def _one_token(engine, step: int) -> torch.Tensor:
    """Equal tokens go to the same expert; each rank has another token."""
    return loss_of(engine, torch.full((B, S), 7 + 5 * dist.get_rank()))


def _by_keyword(engine, step: int) -> torch.Tensor:
    tokens = _tokens(step).to(engine.device)
    return engine(input_ids=tokens, labels=tokens).loss


def _evaluate(engine, step: int) -> None:
    """Forward passes without a backward pass."""
    engine.eval()
    with torch.no_grad():
        _once(engine, 20)
    _once(engine, 21)
    engine.train()
    _once(engine, 22)


def _freeze_and_back(engine, step: int) -> None:
    for part in ("embedding", "decoder.layers.0.self_attention", "decoder.layers.1.mlp.linear_fc1"):
        _freeze(engine.module, part, trains=step == 1)


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    loss: Callable = _once
    units: int = LAYERS
    zero: dict = {}
    config: dict = {}
    coat: dict = {}
    after: Callable = lambda engine, step: None
    """Called behind each step."""
    wanted: bool | None = None
    base: int = 1
    """Stage of the engine to compare with; 3, without units, where stage 1 rounds otherwise."""
    steps: int = 2


COMPRESS = {"fp8_activation_checkpointing": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CASES = {
    "sqrt8": Case(lambda: gpt(activations=ActivationsConfig(attention_format="sqrt8"))),
    "module by module": Case(gpt, units=0, wanted=False),
    "8-bit attention, module by module": Case(
        lambda: gpt(activations=ActivationsConfig(attention_format="sqrt8")), units=0, wanted=False
    ),
    "small buckets": Case(
        gpt, zero={"reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 30000, "sub_group_size": 9000}
    ),
    "accumulation": Case(
        gpt, base=3, steps=4, config={"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    ),
    "full recompute": Case(lambda: gpt(**FULL), coat=COMPRESS),
    "reentrant": Case(lambda: _checkpointed(_by_torch), coat=COMPRESS),
    # the recompute ends within the layer, before DeepSpeed's hook that releases its weights
    "not reentrant": Case(lambda: _checkpointed(partial(_by_torch, use_reentrant=False)), coat=COMPRESS),
    "DeepSpeed's checkpoint": Case(lambda: _checkpointed(_by_deepspeed), coat=COMPRESS),
    "two forwards": Case(gpt, _twice),
    "evaluation, tied": Case(lambda: gpt(tied=True), after=_evaluate),
    "experts": Case(lambda: gpt(**ONE_FOR_ALL), _one_token),
    "grouped experts": Case(lambda: gpt(**GROUPED), _one_token),
    "hybrid": Case(_stack, units=4),
    "frozen part": Case(lambda: _freeze(gpt(), "decoder.layers.0.mlp.linear_fc1"), units=1),
    # at stage 1 the border between ranks cuts a group of the moments
    "frozen later": Case(gpt, after=_freeze_and_back, steps=4, base=3),
    "offload": Case(gpt, zero=OFFLOAD, base=3),
    "secondary partitions": Case(gpt, zero={"zero_hpz_partition_size": 2}),
    "Megatron's": Case(lambda: gpt(False), wanted=True),
    "Hugging Face's, converted": Case(_llama, _by_keyword),
    "Qwen3-MoE of 24 experts, converted": Case(FAMILIES["qwen3_moe_grouped"].build, _by_keyword),
}  # fmt: skip


def engine_of(case: Case, stage: int, wanted: str | bool):
    import deepspeed

    from megatron_ext import mpu

    torch.manual_seed(0)
    model = case.build()
    config = {
        "train_micro_batch_size_per_gpu": B,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **(GATHERED | case.zero if stage == 3 else {})},
        "coat": {"enabled": True, "zero3_layer_units": wanted} | case.coat,
        **case.config,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, mpu=mpu, config=config)[0]


def forward_backward(engine, case: Case, step: int) -> tuple[float, int]:
    """The loss, and the bytes that the whole model saves for backward."""
    kept, parameters = {}, list(engine.module.parameters())

    def pack(x):
        # weights and their aliases do not count as saved: ZeRO-3 releases them
        weights = {p.untyped_storage().data_ptr() for p in parameters}
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x if x.is_leaf else x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = case.loss(engine, step)
    engine.backward(loss)
    return loss.item(), sum(storage.nbytes() for storage in kept.values())


def train(case: Case, stage: int, wanted: str | bool) -> dict:
    from deepspeed.utils import safe_get_full_grad

    said = []
    with mock.patch("coat_ds.zero.engine.log_rank_0", lambda text, level=None: said.append(text)):
        engine = engine_of(case, stage, wanted)
    found = {"losses": [], "kept": [], "grads": None, "said": "\n".join(said)}
    for step in range(case.steps):
        loss, kept = forward_backward(engine, case, step)
        if found["grads"] is None and engine.is_gradient_accumulation_boundary():
            grads = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters() if p.requires_grad}
            found["grads"] = {name: grad.float().clone() for name, grad in grads.items()}
        engine.step()
        case.after(engine, step)
        found["losses"].append(loss)
        found["kept"].append(kept)
    found["units"] = sum(getattr(module, "zero3_unit", False) for module in engine.module.modules())
    engine.destroy()
    found["units left"] = sum(getattr(module, "zero3_unit", False) for module in engine.module.modules())
    return found


def start(backend: str) -> None:
    import deepspeed

    from megatron_ext import cpu, mpu
    from megatron_ext.model import initialize_model_parallel

    cpu.enable()
    deepspeed.init_distributed(backend)
    initialize_model_parallel()
    deepspeed.checkpointing.configure(mpu)
