"""Bytes of weights, masters, states and gradients on a GPU, by ZeRO's stage.

Of N parameters a GPU has N' = N / tensor, over D data parallel GPUs; S = N' / D is the part that it steps.

| | bytes, held between steps |
|---|---|
| weights | 2 N'; 2 N' / D at stage 3, norms whole |
| masters | 4 S; 2 S in BF16 |
| states | 8 S; about 2.07 S with COAT, norms aside |
| FP8 copies | 2 bytes an element of the layers' matrices, where they are cached |
| gradients | at stage 3 a buffer of 2 S; Megatron's own, of 4 N' |

Under Megatron's expert parallelism N' has a GPU's part of the experts, and S stays the same.
"""

from coat_ds.optim.host_states import CHUNK, SLOTS
from coat_ds.optim.release import BACKLOG
from coat_ds.plan.experts import BF16, FP32
from coat_ds.plan.layout import Layout
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import FP32_MOMENTS, System

# an FP8 copy of weights for forward, one for backward
COPIES = 2


def stepped_bytes(compressed: float, kept: float, system: System) -> tuple[float, float]:
    """Bytes of masters and of states. `compressed` elements have 8-bit moments, `kept` FP32 moments."""
    numel = compressed + kept
    states = system.state_bytes() * compressed + FP32_MOMENTS * kept
    if not system.bf16_masters:
        return FP32 * numel, states
    # 16 more bits of each master
    exact = system.optimizer == "coat" and system.coat.optimizer.bf16_params == "exact"
    return BF16 * numel, states + exact * 2 * numel


class ModelStates:
    """Elements and bytes on a GPU."""

    def __init__(self, sizes: Sizes, layout: Layout, system: System, first: bool = True, last: bool = True):
        """first, last: whether embedding and head are among the layers."""
        self.sizes, self.layout, self.system = sizes, layout, system
        tables = 1 if sizes.tied and first and last else first + last
        self.norms = sizes.norms - (0 if last else sizes.hidden)
        split = sizes.layers * sizes.layer_matrices + tables * sizes.table + sizes.other_parameters
        whole = split / layout.tensor + self.norms
        self.parameters = whole - layout.remote_expert_share * sizes.expert_weights
        # of fewer experts a GPU steps a larger share
        self.part = whole / layout.data
        self.in_deepspeed = layout.framework == "deepspeed" and not system.release
        self.on_cpu = system.offload or layout.offload_optimizer
        # bytes of an element of accumulated gradients
        self.gradient = FP32 if layout.fp32_gradients else BF16
        # DeepSpeed 0.19.8 reduces FP32 gradients of stage 2 into one flat tensor, which the step takes; with
        # COAT's optimizer on the GPU 16-bit gradients of stages 1 and 2, too
        own = system.optimizer == "coat" and layout.flat_gradients and not self.on_cpu
        self.flat = self.in_deepspeed and layout.stage in (1, 2) and (layout.fp32_gradients or own)
        # bytes of the gradients that are this GPU's part; without FP32 they go to the CPU with the masters
        self.reduced = self.gradient * self.part if self.flat or not self.on_cpu else 0
        norms = self.norms / layout.data
        self.masters, self.states = stepped_bytes(self.part - norms, norms, system)
        if system.release:
            # the weights
            self.masters = 0
        # states that stream through the GPU in each step
        self.streamed = max(0, self.states - system.resident)

    def held(self) -> dict[str, float]:
        """Bytes by role between steps."""
        layout, system = self.layout, self.system
        weights = BF16 * self.parameters
        if layout.stage == 3:
            weights = 0 if layout.offload_parameters else weights / layout.data
            weights += BF16 * self.norms
        held = {"weights": weights}
        if not self.on_cpu:
            held |= {"masters": self.masters, "states": self.states - self.streamed}
        if layout.framework == "megatron":
            held["gradients"] = self.gradient * self.parameters
        elif layout.stage == 3:
            held |= {"gradients": self.reduced, "buffers": self.buckets()}
        if system.caches_weights:
            converted = self.sizes.layers * self.sizes.converted_matrices / layout.tensor
            held["copies"] = COPIES * (converted - layout.remote_expert_share * self.sizes.expert_weights)
        return held

    @property
    def on_host(self) -> float:
        """Bytes in host memory: masters, states and FP32 gradients, or streamed states; and weights."""
        found = self.offloaded if self.on_cpu else self.streamed
        return found + (BF16 * self.part if self.layout.offload_parameters else 0)

    @property
    def offloaded(self) -> float:
        """Bytes of masters, states and FP32 gradients."""
        return self.masters + self.states + FP32 * self.part

    @property
    def gathered(self) -> float:
        """Bytes of the weights that ZeRO-3 has gathered at most: DeepSpeed gathers the next module as long as
        fewer than `max_live` elements are there."""
        module = self.sizes.layer_matrices if self.system.has_units else self.sizes.largest_module
        return BF16 * min(self.parameters, self.layout.max_live + module / self.layout.tensor)

    def buckets(self) -> float:
        """Bytes of the gradient buckets: one, or two if their reduction overlaps with backward."""
        two = self.layout.overlap and self.layout.stage < 3
        element = self.gradient if self.layout.stage == 1 else BF16
        return element * self.layout.reduce_bucket * (1 + two)

    def earlier_gradients(self) -> dict[str, float]:
        """Gradients of earlier micro-batches of a step, as DeepSpeed holds them; at stage 1 also the bucket,
        though it is filled only after the last micro-batch."""
        if not self.in_deepspeed or self.layout.accumulation == 1 or self.layout.stage == 3:
            return {}
        if self.layout.stage == 2:
            return {"gradients": self.reduced}
        return {"gradients": self.gradient * self.parameters, "buffers": self.buckets()}

    def gradients_in_backward(self) -> dict[str, float]:
        """Gradients while backward runs. At stage 2 they are reduced as they come. If backward applies them,
        there are those of a chunk and of the head, and those that wait for states in host memory."""
        if self.system.release:
            waiting = CHUNK + self.sizes.table + (BACKLOG if self.streamed else 0)
            slots = min(1, SLOTS * CHUNK / self.part) * self.streamed
            return {"gradients": BF16 * min(self.parameters, waiting), "buffers": slots}
        if self.in_deepspeed and self.layout.stage == 2:
            return {"gradients": self.reduced, "buffers": self.buckets()}
        return self.earlier_gradients()

    def step(self) -> dict[str, float]:
        """Gradients and temporary tensors of the optimizer's step."""
        layout, system = self.layout, self.system
        # chunks that are on the GPU at once, as a share of what streams through it
        chunks = min(1, SLOTS * CHUNK / self.part)
        if not self.in_deepspeed or self.on_cpu:
            streamed = self.offloaded if self.on_cpu and system.optimizer == "coat" else 0
            return {"gradients": self.reduced if self.flat else 0, "temporaries": chunks * streamed}
        # ZeRO-3 steps a sub-group at once
        part = min(self.part, layout.sub_group) if layout.stage == 3 else self.part
        gradients = self.gradient * part if layout.stage < 3 else 0
        temporaries = 0 if self.flat else self.gradient * part
        if system.optimizer == "transformer_engine":
            # both moments in FP32, and gradients; what was flat is gone by then
            temporaries = 3 * FP32 * part
        elif not self._takes_narrow():
            temporaries += FP32 * part
        return {"gradients": gradients, "temporaries": temporaries + chunks * self.streamed}

    def _takes_narrow(self) -> bool:
        """Whether the step takes gradients as they were accumulated, without a copy in FP32."""
        return self.system.optimizer == "coat" or self.system.bf16_masters or self.layout.fp32_gradients

    @property
    def in_one_piece(self) -> float:
        """Bytes of the gradients that ZeRO-1 allocates after each backward, in one tensor."""
        if not self.in_deepspeed or self.layout.stage != 1 or self.on_cpu:
            return 0
        return (self.gradient if self._takes_narrow() else FP32) * self.part
