"""Bytes on a GPU by role, at each moment of a training step that may be the peak.

Held between steps are weights, masters, states and FP8 copies (`model_states.py`), cuBLAS workspaces, and
buffers: gathered hidden states under tensor parallelism, and at stage 3 the bucket. A moment adds to these:

- loss: all saved activations (`saved.py`) and the logits (`passes.py`);
- head: the gradient of its matrix, and at stage 2 the bucket and the buffer of 2 S;
- layers, from the last to the first: gradients within a layer, while saved activations go;
- gradients (stage 1): all of N' in BF16, and the copy of the part that is stepped, 2 S;
- each of these, where a step has several micro-batches, also the gradients of earlier ones;
- loss and layers, at stage 3: gathered weights, of `max_live` elements and of the module that runs;
- step: the stepped part flat, 2 S, and in FP32, 4 S, which COAT does without.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from coat_ds.plan.errors import PlanError
from coat_ds.plan.experts import BF16, FP32
from coat_ds.plan.layout import Layout
from coat_ds.plan.model_states import ModelStates
from coat_ds.plan.passes import Passes
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System

# torch gives cuBLAS 8 x 4 MiB on Hopper for each thread that multiplies: forward's and backward's
WORKSPACES = 2 * 8 * 4 * 2**20


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest GPU at a moment, by role."""

    moment: str
    """"loss", "head", "layers", "gradients" or "step"."""
    weights: float = 0
    gradients: float = 0
    masters: float = 0
    states: float = 0
    saved: float = 0
    """Activations of layers that backward needs."""
    logits: float = 0
    """Logits, and what else the head saves."""
    gathered: float = 0
    """ZeRO-3's whole weights."""
    buffers: float = 0
    """Buffers of messages and GEMMs."""
    copies: float = 0
    """FP8 copies of weights."""
    graphs: float = 0
    """What layers that are recorded as CUDA graphs hold: what they save, and their inputs."""
    temporaries: float = 0
    """Temporary tensors of the GEMMs, kernels and optimizer step that run at that moment."""

    @property
    def total(self) -> float:
        return sum(getattr(self, role) for role in ROLES)


# what bytes are for
ROLES = tuple(field.name for field in dataclasses.fields(Memory) if field.name != "moment")


@dataclass(frozen=True, slots=True)
class Prediction:
    """The memory of a step on the fullest GPU."""

    moments: tuple[Memory, ...]
    on_host: float
    """Bytes of offloaded tensors in the CPU's memory, for each GPU."""
    in_one_piece: float
    """Bytes of the gradients that ZeRO-1 allocates after each backward, in one tensor."""

    @property
    def peak(self) -> Memory:
        return max(self.moments, key=lambda memory: memory.total)

    @property
    def with_room(self) -> float:
        """Bytes that leave room for `in_one_piece`. With fewer, memory is fragmented: in every step torch's
        allocator frees its cache and allocates it from the GPU again, which is a third slower
        (benchmarks/results/train_13b_4gpu_tp4_flushes.csv)."""
        before = max(m.total for m in self.moments if m.moment not in ("gradients", "step"))
        return max(self.peak.total, before + self.in_one_piece)


def predict(sizes: Sizes, layout: Layout, system: System) -> Prediction:
    """Bytes of a step on the fullest GPU. Of a pipeline that is in its first or its last stage."""
    ends = [(True, True)] if layout.pipeline == 1 else [(True, False), (False, True)]
    found = (_predict(sizes, layout, system, first, last) for first, last in ends)
    return max(found, key=lambda prediction: prediction.peak.total)


def _predict(sizes: Sizes, layout: Layout, system: System, first: bool, last: bool) -> Prediction:
    if sizes.layers % layout.pipeline:
        raise PlanError(
            f"--pipeline: {layout.pipeline} does not divide the {sizes.layers} layers. Planned are equal "
            "stages: change it."
        )
    sizes = sizes.of_stage(layout.pipeline)
    states = ModelStates(sizes, layout, system, first, last)
    leave = not states.in_deepspeed or (layout.stage == 2 and (states.flat or states.on_cpu))
    # 1F1B: the number of micro-batches in flight in the first stage is that of the stages
    in_flight = min(layout.accumulation, layout.pipeline) if first else 1
    passes = Passes(sizes, layout, system, in_flight, leave)
    held = _sum(states.held(), buffers=WORKSPACES, graphs=passes.graphs)
    if layout.tensor > 1:
        # gathered hidden states
        held = _sum(held, buffers=layout.tensor * passes.hidden)
    if layout.stage == 3 and layout.data > 1:
        gathered, head = states.gathered, _head_gradient(states)
        moments = [
            _at("loss", held, saved=passes.saved, logits=passes.logits(), gathered=gathered),
            _at("head", held, saved=passes.saved, gradients=head, temporaries=passes.hidden),
            _at("layers", held, saved=passes.saved, temporaries=passes.temporaries(), gathered=gathered),
        ]
    else:
        moments = _passes(held, states, passes, last)
    moments.append(_at("step", held, states.step()))
    return Prediction(tuple(moments), states.on_host, states.in_one_piece)


def _passes(held: Mapping, states: ModelStates, passes: Passes, has_head: bool) -> list[Memory]:
    layout, gradients, moments = states.layout, states.gradients_in_backward(), []
    head = _head_gradient(states)
    if has_head:
        loss = {"saved": passes.saved, "logits": passes.logits()}
        moments.append(_at("loss", held, loss, states.earlier_gradients()))
        # the head's gradient on its way into the flat tensor
        wide = FP32 / BF16 * head if layout.stage == 2 and layout.fp32_gradients else 0
        at_head = {"saved": passes.saved, "gradients": head, "temporaries": passes.hidden + wide}
        moments.append(_at("head", held, gradients, at_head))
    in_layers = {"saved": passes.saved, "temporaries": passes.temporaries()}
    if layout.stage == 2 and states.flat and head > BF16 * layout.reduce_bucket:
        # DeepSpeed keeps a gradient that fits no bucket until backward is done
        in_layers["gradients"] = head
    moments.append(_at("layers", held, gradients, in_layers))
    if states.in_deepspeed and layout.stage == 1:
        # ZeRO-1 reduces them after backward
        reduced = states.gradient * states.parameters + states.reduced
        moments.append(_at("gradients", held, gradients=reduced, buffers=states.buckets()))
    return moments


def _head_gradient(states: ModelStates) -> float:
    """Bytes of the gradient of the head's matrix; Megatron adds it to its own at once."""
    return BF16 * states.sizes.table / states.layout.tensor if states.in_deepspeed else 0


def _at(moment: str, *parts: Mapping[str, float], **more: float) -> Memory:
    return Memory(moment, **_sum(*parts, **more))


def _sum(*parts: Mapping[str, float], **more: float) -> dict[str, float]:
    """Bytes by role, added up."""
    parts = (*parts, more)
    return {role: found for role in ROLES if (found := sum(part.get(role, 0) for part in parts))}
