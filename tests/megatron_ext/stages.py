"""One step of Megatron's pipeline schedules."""

import contextlib

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext import cpu
from megatron_ext import model as models
from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.model import ModelShape
from tests.megatron_ext.layers import without_rounding
from tests.megatron_ext.ranks import join

S, B, VOCAB, LAYERS, MICRO_BATCHES = 16, 2, 64, 8, 4
H, FFN, HEADS = 32, 48, 4


def _whole_names(stage):
    """This stage's parameters by their names in a model of one stage."""
    first = stage.decoder.layers[0].layer_number - 1
    for name, parameter in stage.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + first)
        yield ".".join(parts), parameter


def train(pipeline, virtual, weights, exact=False):
    """One step of Megatron's schedule; losses by micro-batch and gradients by the whole model's names."""
    sizes = {"virtual_pipeline_model_parallel_size": virtual} if virtual else {}
    device = join(pipeline_model_parallel_size=pipeline, **sizes)
    # with two interleaved ranks, each is both the previous and the next stage of the other: Megatron
    # distinguishes their messages only with overlap
    overlap = {"overlap_p2p_comm": True, "batch_p2p_comm": False} if virtual and pipeline == 2 else {}
    stages = [
        models.build_gpt(
            ModelShape(LAYERS, H, FFN, HEADS, HEADS),
            coat_layer_spec,
            seq_length=S,
            vocab_size=VOCAB,
            bf16=False,
            # the default of Megatron-LM
            deallocate_pipeline_outputs=True,
            vp_stage=stage,
            **sizes,
            **overlap,
        )
        for stage in (range(virtual) if virtual else [None])
    ]
    parameters = {name: p for stage in stages for name, p in _whole_names(stage)}
    if weights is not None:
        for name, p in parameters.items():
            p.data.copy_(weights[name])

    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (MICRO_BATCHES, B, S), generator=generator).to(device)
    positions = torch.arange(S, device=device).expand(B, S)
    losses = []

    def forward_step(batches, model):
        batch = next(batches)
        output = model(batch, positions, None, labels=batch)

        def loss(output):
            value = output.mean()
            losses.append(value.item())
            return value, {}

        return output, loss

    batches = [iter(tokens) for _ in stages]
    with cpu.no_cuda(), without_rounding() if exact else contextlib.nullcontext():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches if virtual else batches[0],
            model=stages if virtual else stages[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=S,
            micro_batch_size=B,
        )
    result = {
        "losses": losses,
        "weights": {name: p.detach().cpu() for name, p in parameters.items()},
        "grads": {name: p.grad.cpu() for name, p in parameters.items()},
    }
    parallel_state.destroy_model_parallel()
    return result
