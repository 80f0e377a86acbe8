"""Bytes on a GPU by what they are for, at each moment of a training step that may be the peak.

Of N parameters a GPU has N' = N / (tensor x pipeline), over D data parallel GPUs; S is the part of them
that it steps, N' / D under ZeRO. Megatron's routed experts have a tensor and a data parallel size of their
own, and an expert parallel size; its routers are not divided. t tokens in a micro-batch, T the tensor
parallel size; h hidden channels, f of the feed-forward layer, u before its activation (2 f where it is
gated), V vocabulary.

Held between steps:

| | bytes |
|---|---|
| weights | 2 N'; 2 N' / D at stage 3 |
| masters | 4 S; 2 S in BF16 |
| states | 8 S; about 2.07 S with COAT, norms aside |
| FP8 copies | 2 bytes an element of the layers' matrices, where they are cached |
| gradients | at stage 3 a buffer of 2 S; Megatron's own, of 2 or 4 N' |
| buffers | torch's cuBLAS workspaces; at stage 3 the bucket; gathered hidden states, 2 t h |

What layers save for backward is in `saved.py`.

Bytes at each moment of a step, in addition to what is held, saved activations, and ZeRO-3's gathered
weights and second copies (over p GPUs, 2 / p of each parameter, from where it is released first to the end
of the step):

- forward, at stage 3: from the first layer to the last, while saved activations come;
- loss: logits in BF16 and FP32, 6 t V / T, and the inputs of the last norm and of the head;
- head: the gradient of its matrix, 2 V h / T, and with it, at stage 2, the bucket and the buffer of 2 S;
- layers, from the last to the first: gradients of hidden states and of the activation, 2 (h + u) t and with
  the same number of bytes of FP8 copies for GEMMs, while saved activations go and gathered weights come; with
  experts also the gradients of all weights of a layer, where each GEMM has one tensor;
- gradients (stage 1): all of N' in BF16, and the copy of the part that is stepped, 2 S;
- each of these but the last, where a step has several micro-batches, also with the gradients of earlier ones:
  all of N' in BF16 at stages 0 and 1, there with the bucket, and 2 S at stage 2;
- step: that part flat, 2 S, and in FP32, 4 S, which COAT does without. At stage 0 all of N' in FP32, one by
  one and then in one tensor, 8 N', with COAT too.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass

from coat_ds.optim.host_states import CHUNK, SLOTS
from coat_ds.plan.experts import BF16, FP32, Experts
from coat_ds.plan.gathers import Gathered, Module, replay
from coat_ds.plan.layout import Layout
from coat_ds.plan.saved import saved_per_token
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import FP32_MOMENTS, System
from coat_kernels.graphs import graphed_work

ROLES = (
    "weights",
    "gradients",
    "masters",
    "states",
    "saved",
    "logits",
    "gathered",
    "buffers",
    "copies",
    "graphs",
    "temporaries",
)
# torch gives cuBLAS 8 x 4 MiB on Hopper for each thread that multiplies: forward's and backward's
WORKSPACES = 2 * 8 * 4 * 2**20
# tensors that a recorded layer's graphs are handed over in: its input, and two gradients
GRAPH_BUFFERS = 3
# an FP8 copy of weights for forward, one for backward
COPIES = 2


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
    """ZeRO-3's whole weights, and the second copies of weights."""
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


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step takes on the fullest GPU."""

    moments: tuple[Memory, ...]
    host: float
    """Bytes in the CPU's memory for each GPU: of masters, states and gradients, and of parts of weights; of
    states alone, if they stream."""
    in_one_piece: float
    """Bytes of the gradients that ZeRO-1 allocates after each backward, in one tensor."""
    may_wait: bool
    """Whether `cuda_graphs` null leaves layers, to save memory, to the CPU, for which the GPU may wait."""

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
    """Bytes of a step. With pipeline parallelism of the fullest stage."""
    stages = (_Stage(sizes, layout, system, index) for index in range(layout.pipeline))
    return max((stage.predict() for stage in stages), key=lambda found: found.peak.total)


def stepped_bytes(compressed: float, kept: float, system: System) -> tuple[float, float]:
    """Bytes of masters and of states. `compressed` elements have 8-bit moments, `kept` FP32 moments."""
    numel = compressed + kept
    states = system.state_bytes() * compressed + FP32_MOMENTS * kept
    if not system.bf16_masters:
        return FP32 * numel, states
    # 16 more bits of each master
    exact = system.optimizer == "coat" and system.coat.optimizer.bf16_params == "exact"
    return BF16 * numel, states + exact * 2 * numel


class _Stage:
    """One stage of a pipeline, or the whole model."""

    def __init__(self, sizes: Sizes, layout: Layout, system: System, index: int):
        self.layout, self.system = layout, system
        first, last = index == 0, index == layout.pipeline - 1
        self.first, self.last = first, last
        tensor, h = layout.tensor, sizes.hidden
        self.layers = -(-sizes.layers // layout.pipeline)
        # all stages as full as the fullest
        begin = min(index * self.layers, sizes.layers - self.layers)
        self.sizes = sizes.part(slice(begin, begin + self.layers))
        self.stack = self.sizes.stack()
        routed, rest = (self.layers * n for n in self.sizes.layer_on_gpu(tensor, layout.expert_shares))
        self.matrices = routed + rest
        tables = 1 if sizes.tied and first and last else first + last
        self.norms = 2 * self.layers * h + h * last
        other = sizes.other_parameters / layout.pipeline / tensor
        rest += tables * sizes.table / tensor + self.norms + other
        self.parameters = routed + rest
        data, expert_data = (layout.data, layout.expert_data) if layout.stage else (1, 1)
        self.part, self.norms_part = routed / expert_data + rest / data, self.norms / data
        self.on_cpu = system.offload or layout.optimizer_device == "cpu"
        # an element of gradients that are added up
        self.gradient = FP32 if layout.fp32_gradients else BF16
        self.in_one_buffer = layout.in_one_buffer and not system.offload
        # stages 1 and 2 of DeepSpeed 0.19.8 reduce FP32 gradients into one flat tensor, which the step takes;
        # with COAT's optimizer on the GPU those in 16 bits, too
        in_parts = layout.host == "deepspeed" and layout.stage in (1, 2) and not self.in_one_buffer
        own = system.optimizer == "coat" and layout.flat_gradients and not self.on_cpu
        self.reduced_flat = in_parts and (layout.fp32_gradients or own)
        # bytes of the gradients that are this GPU's part; without FP32 they go to the CPU with the masters
        self.reduced = self.gradient * self.part if self.reduced_flat or not self.on_cpu else 0
        # 1F1B: the number of micro-batches under way in a stage is the number of stages from it on
        self.under_way = min(layout.accumulation, layout.pipeline - index)

    def predict(self) -> Prediction:
        held = self._held()
        moments = [*self._backward(held), self._step(held)]
        if self.last:
            moments.insert(0, self._loss(held))
        if self._gathers():
            moments.insert(0, self._forward_of_stage_3(held))
        return Prediction(tuple(moments), self._on_host(), self._in_one_piece(), self._may_wait())

    def _at(self, moment: str, held: dict, **more: float) -> Memory:
        return Memory(moment, **{role: held.get(role, 0) + more.get(role, 0) for role in ROLES})

    def _states(self) -> tuple[float, float]:
        """Bytes of masters and of states, wherever they are."""
        return stepped_bytes(self.part - self.norms_part, self.norms_part, self.system)

    def _held(self) -> dict[str, float]:
        sizes, layout, system = self.sizes, self.layout, self.system
        masters, states = (0, 0) if self.on_cpu else self._states()
        if system.streams:
            states = 0
        weights = BF16 * self.parameters
        if layout.stage == 3:
            weights = 0 if layout.parameter_device == "cpu" else weights / layout.data
            weights += BF16 * self.norms
        held = {"weights": weights, "masters": masters, "states": states, "buffers": WORKSPACES}
        held["buffers"] += BF16 * self._gathered_tokens() * sizes.hidden
        if layout.host == "megatron":
            held["gradients"] = self.gradient * self.parameters
        elif layout.stage == 3:
            held["gradients"] = self.reduced
            held["buffers"] += self._buckets()
        elif self.in_one_buffer:
            held["gradients"] = FP32 * self.parameters
        if system.caches_weights:
            held["copies"] = (
                COPIES * self.layers * sizes.converted_on_gpu(layout.tensor, layout.expert_shares)
            )
        if self._has_graphs():
            held["graphs"] = self._saved() + GRAPH_BUFFERS * self._hidden()
        return held

    def _gathered_tokens(self) -> float:
        """Tokens that Megatron's one buffer holds for gathers of hidden states."""
        layout, found = self.layout, 0.0
        if layout.tensor > 1 and layout.sequence_parallel:
            found = layout.tokens
        if self.sizes.experts and layout.gathers_tokens and layout.expert_shares > 1:
            found = max(found, layout.tokens * layout.dispatched)
        return found

    def _on_host(self) -> float:
        layout = self.layout
        found = 0.0
        if self.on_cpu:
            # and gradients in FP32
            found = sum(self._states()) + FP32 * self.part
        elif self.system.streams:
            found = self._states()[1]
        if layout.parameter_device == "cpu":
            found += BF16 * self.part
        return found

    def _has_graphs(self) -> bool:
        """Whether layers are recorded."""
        wanted, layout = self.system.coat.activations.cuda_graphs, self.layout
        if wanted is None:
            leave = layout.host == "megatron" or (layout.stage == 2 and (self.reduced_flat or self.on_cpu))
            wanted = self._is_small(leave)
        return bool(wanted and self._recordable())

    def _may_wait(self) -> bool:
        auto = self.system.coat.activations.cuda_graphs is None
        return auto and self._recordable() and self._is_small(True) and not self._has_graphs()

    def _recordable(self) -> bool:
        """Whether layers can be recorded, as fused blocks can; these have no experts."""
        system = self.system
        blocks = system.layers == "coat" and system.recompute == "none" and self.sizes.experts is None
        return blocks and self.layout.stage < 3

    def _is_small(self, gradients_leave: bool) -> bool:
        work = self.layout.tokens * self.matrices / self.layers
        return work <= graphed_work(self.layout.tensor, gradients_leave)

    def _buckets(self) -> float:
        """Elements of the gradient buckets: one, or two if their reduction overlaps with backward."""
        overlaps = self.layout.stage == 3 if self.layout.overlap is None else self.layout.overlap
        two = overlaps and self.layout.stage < 3
        element = self.gradient if self.layout.stage == 1 else BF16
        return element * self.layout.reduce_bucket * (1 + two)

    def _hidden(self) -> float:
        """Bytes of hidden states between layers."""
        return BF16 * self.layout.tokens * self.sizes.hidden / self.layout.between

    def _saved(self) -> float:
        """Bytes that the layers keep of a micro-batch."""
        sizes, layout, system = self.sizes, self.layout, self.system
        found = self.layers * layout.tokens * saved_per_token(sizes, layout, system)
        # cosine and sine, in FP32 once for all; Megatron's own layers make them for queries and for keys
        positions = layout.sequence * sizes.head_dim * 2
        own = system.layers != "coat" and sizes.maker == "megatron" and system.recompute != "full"
        return found + (self.layers * 2 * BF16 * positions if own else FP32 * positions)

    def _head(self) -> tuple[float, float, float]:
        """Bytes that the head saves, and what its forward and its backward take in addition."""
        logits = self.layout.tokens * self.sizes.vocabulary / self.layout.tensor
        if self.sizes.maker == "transformers":
            # logarithms of FP32 logits, and both kinds of logits; backward has two gradients of them
            return 4 * self._hidden() + 4 * logits, 6 * logits, 8 * logits
        more = self._hidden() if self.system.layers == "coat" else 0
        return 2 * self._hidden() + 4 * logits, 2 * logits + more, 2 * logits

    def _gathered_together(self) -> list[list[list[float]]]:
        """Elements of what ZeRO-3 gathers at once, by layer: of each module, or of the whole layer."""
        sizes, tensor = self.sizes, self.layout.tensor
        layers = [[[n / tensor if n > sizes.hidden else n for n in m] for m in layer] for layer in self.stack]
        if self.system.has_units:
            if sizes.maker == "megatron":
                # in the order of a layer's parameters, the projection is the first of attention
                layers = [[norm, proj, qkv, *rest] for norm, qkv, proj, *rest in layers]
            return [[[n for module in layer for n in module]] for layer in layers]
        return layers

    def _gathered(self) -> tuple[Module, ...]:
        """At each module, forward and then backward: elements."""
        sizes, layout, layers = self.sizes, self.layout, self._gathered_together()
        prefetch = layout.prefetch
        if prefetch is None:
            prefetch = layout.limits.prefetch
            if self.system.has_units:
                prefetch = max(prefetch, *(sum(layer[0]) for layer in layers))
        limits = layout.limits._replace(prefetch=prefetch)
        table = sizes.table / layout.tensor
        modules = [module for layer in layers for module in layer]
        # the model, and what holds the embedding, or all layers, have no weights of their own, and look ahead
        return replay([[], [], [table], [], *modules, [sizes.hidden], [table]], limits)

    def _gathered_bytes(self, gathered: Gathered) -> float:
        # quantized, the buffer has 8-bit codes and the values decoded from them
        buffers = BF16 + 1 if self.layout.quantized_gathers else BF16
        second = self._second_copies(gathered.released if self.layout.accumulation == 1 else None)
        return BF16 * gathered.weights + buffers * gathered.buffers + second

    def _second_copies(self, released: float | None = None) -> float:
        """Bytes of ZeRO-3's second copies of `released` elements. None: of all."""
        layout = self.layout
        if not self._gathers() or layout.second_copy == 1 or layout.parameter_device == "cpu":
            return 0
        elements = self.parameters - self.norms if released is None else released
        return BF16 * elements / layout.second_copy

    def _saved_now(self) -> float:
        return 0 if self._has_graphs() else self.under_way * self._saved()

    def _gathers(self) -> bool:
        return self.layout.stage == 3 and self.layout.data > 1

    def _forward_of_stage_3(self, held: dict) -> Memory:
        saved, replayed = self._saved_now(), self._gathered()
        # after the embedding
        gathered = self._most_gathered(self._gathered_together(), replayed[4:])
        moments = []
        for layer, (begins, runs) in enumerate(gathered):
            # its input, and what the layer before has added to
            before = {"saved": saved * layer / self.layers, "temporaries": 2 * self._hidden()}
            moments.append(self._at("forward", held, gathered=begins, **before))
            moments.append(self._at("forward", held, saved=saved * (layer + 1) / self.layers, gathered=runs))
        return max(moments, key=lambda memory: memory.total)

    def _most_gathered(
        self, layers: Iterable[Sized], replayed: Sequence[Module]
    ) -> Iterator[tuple[float, float]]:
        """Bytes while each of these layers' modules, which are the first that are replayed, begin, and while
        they run."""
        start = 0
        for modules in map(len, layers):
            begin, run = zip(*replayed[start : start + modules], strict=True)
            yield max(map(self._gathered_bytes, begin)), max(map(self._gathered_bytes, run))
            start += modules

    def _loss(self, held: dict) -> Memory:
        keeps, forward, backward = self._head()
        gathered = 0
        if self._gathers():
            replayed = self._gathered()
            gathered = self._gathered_bytes(replayed[len(replayed) // 2 - 1].runs)
        logits = keeps + max(forward, backward)
        more = {"saved": self._saved_now(), "logits": logits, "gathered": gathered}
        return self._at("loss", held, **more, **self._accumulated())

    def _accumulated(self) -> dict[str, float]:
        """Gradients of earlier micro-batches of a step, as DeepSpeed holds them; at stage 1 also the bucket,
        though it is filled only after the last micro-batch."""
        layout = self.layout
        if layout.host != "deepspeed" or layout.accumulation == 1 or layout.stage == 3:
            return {}
        if layout.stage == 2:
            return {"gradients": self.reduced}
        if self.in_one_buffer:
            return {"gradients": self._beside_the_buffer()}
        buffers = self._buckets() if layout.stage == 1 else 0
        return {"gradients": self.gradient * self.parameters, "buffers": buffers}

    def _beside_the_buffer(self) -> float:
        """Bytes of gradients that are in DeepSpeed's one buffer in FP32, and in BF16 too."""
        return 0 if self.layout.immediate_update else BF16 * self.parameters

    def _temporaries(self) -> float:
        """Bytes of gradients within a layer, at the activation, where they are largest, over what goes."""
        sizes, layout, system = self.sizes, self.layout, self.system
        ffn = BF16 * sizes.widest_ffn * layout.tokens / layout.tensor
        wide = (1 + sizes.gated) * ffn
        if system.layers != "bf16":
            # the product's gradient, and the activation's in FP8 by rows and by columns
            wide += ffn
        elif sizes.maker == "transformers":
            # of the activation's output and of its other factor
            wide += ffn
        found = self._hidden() + max(wide, self._of_experts_backward())
        if system.recompute != "none":
            whole = dataclasses.replace(system, recompute="none")
            found += layout.tokens * saved_per_token(sizes, layout, whole)
        elif system.attends_again and sizes.attends_again:
            # at attention: recomputed q, k, v and output, and their gradients
            again = 2 * BF16 * (sizes.qkv + sizes.queries) * layout.tokens / layout.tensor
            found = max(found, self._hidden() + again)
        if self._has_graphs():
            # the graphs' own memory; results cross in buffers
            found = self._hidden() + BF16 * self.matrices / self.layers
        return found

    def _of_experts_backward(self) -> float:
        """Bytes of gradients of a layer's experts: of gate and up, of their input, and of all their weights,
        which are one tensor for each product, where a tensor holds those of all experts."""
        sizes, layout, experts = self.sizes, self.layout, self.sizes.experts
        if experts is None:
            return 0
        if sizes.maker == "megatron":
            return BF16 * self._of_megatrons_experts(experts)
        activations = layout.tokens * experts.used * (2 * experts.ffn + sizes.hidden)
        # COAT's come expert by expert, and gate's and up's are then put together
        copies = 1 + 2 / 3 * (self.system.layers == "coat" and not experts.grouped)
        weights = copies * 3 * experts.count * experts.ffn * sizes.hidden
        return BF16 * (activations + weights) / layout.tensor

    def _of_megatrons_experts(self, experts: Experts) -> float:
        """Elements of gradients of rows, and of weights that do not go into `main_grad` by themselves."""
        h, layout = self.sizes.hidden, self.layout
        tensor = layout.of_experts_tensor
        rows = layout.tokens * experts.used * tensor / layout.tensor
        # before the activation the columns of one expert, or of all
        wide = experts.fc1 / tensor * (1 if experts.grouped else layout.expert / experts.count)
        back = layout.tokens * layout.dispatched if layout.gathers_tokens else rows
        own = self.system.layers == "coat" and experts.grouped
        weights = experts.routed(h) / layout.expert_shares if own else 0
        return max(rows * (2 * h + wide) + weights, (rows + back) * h)

    def _backward(self, held: dict) -> list[Memory]:
        layout, stage = self.layout, self.layout.stage
        deepspeed = layout.host == "deepspeed"
        saved, temporaries, hidden = self._saved_now(), self._temporaries(), self._hidden()
        head = BF16 * self.sizes.table / layout.tensor if self.last else 0
        # what is reduced as backward goes needs its bucket, and the part that stays
        reduced = {"gradients": self.reduced, "buffers": self._buckets()}
        while_going = reduced if deepspeed and stage == 2 else self._accumulated()
        moments = []
        if self.last:
            own = dict(while_going)
            if deepspeed:
                own["gradients"] = own.get("gradients", 0) + head
            # the head's gradient on its way into the flat tensor
            wide = FP32 * self.sizes.table / layout.tensor if stage == 2 and layout.fp32_gradients else 0
            more = {"gathered": self._second_copies(), "temporaries": hidden + wide}
            moments.append(self._at("head", held, saved=saved, **more, **own))
        if self._gathers():
            moments.append(self._layers_of_stage_3(held, saved, temporaries))
        else:
            own = dict(while_going)
            if self.last and stage == 2 and self.reduced_flat and head > BF16 * layout.reduce_bucket:
                # DeepSpeed keeps a gradient that fits no bucket until backward is done
                own["gradients"] += head
            moments.append(self._at("layers", held, saved=saved, temporaries=temporaries, **own))
        if deepspeed and stage < 2:
            gradients, buffers = self.gradient * self.parameters, 0.0
            if self.in_one_buffer:
                gradients = self._beside_the_buffer()
                buffers = 0 if layout.fp32_messages else BF16 * self.parameters
            elif stage == 1:
                # reduced after backward: what goes first into the bucket leaves room for it
                buffers = self._buckets() - self.gradient * self._moved_first()
                gradients += self.reduced
            more = {"gradients": gradients, "buffers": buffers}
            moments.append(self._at("gradients", held, temporaries=hidden if stage == 0 else 0, **more))
        return moments

    def _moved_first(self) -> float:
        """Elements of gradients that fill the first bucket: none if the first is too large for it."""
        sizes, tensor = self.sizes, self.layout.tensor
        moved = 0.0
        for numel in [*([sizes.table] if self.first else []), *self._large()]:
            if moved + numel / tensor > self.layout.reduce_bucket:
                break
            moved += numel / tensor
        return moved

    def _large(self) -> list[int]:
        """Elements of the layers' matrices, in order."""
        return [n for layer in self.stack for module in layer for n in module if n > self.sizes.hidden]

    def _layers_of_stage_3(self, held: dict, saved: float, temporaries: float) -> Memory:
        replayed = self._gathered()
        # after the head and the last norm
        behind = replayed[len(replayed) // 2 + 2 :]
        moments = []
        for layer, found in enumerate(self._most_gathered(reversed(self._gathered_together()), behind)):
            left = saved * (self.layers - layer) / self.layers
            moments.append(self._at("layers", held, saved=left, gathered=max(found), temporaries=temporaries))
        return max(moments, key=lambda memory: memory.total)

    def _step(self, held: dict) -> Memory:
        layout, system = self.layout, self.system
        if layout.host == "megatron" or self.on_cpu:
            gradients = self.reduced if self.reduced_flat else 0
            return self._at("step", held, gathered=self._second_copies(), gradients=gradients)
        part = self.part
        if layout.stage == 3:
            part = self._stepped_together()
        if layout.stage == 0 and system.optimizer != "transformer_engine":
            return self._at("step", held, gradients=BF16 * part, temporaries=2 * FP32 * part)
        gradients = self.gradient * part if layout.stage in (1, 2) else 0
        flat = self.gradient * part if layout.stage and not self.reduced_flat else 0
        if self.in_one_buffer:
            gradients, flat = self._beside_the_buffer(), 0
        wide = 0 if self._stay_narrow() else FP32 * part
        if system.optimizer == "transformer_engine":
            # both moments in FP32, and gradients; what was flat is gone by then
            flat, wide = 0, (2 if self.in_one_buffer else 3) * FP32 * part
        # the chunks of states that are on the GPU at once
        chunks = self._states()[1] * min(1, SLOTS * CHUNK / self.part) if system.streams else 0
        more = {"gathered": self._second_copies(), "temporaries": flat + wide + chunks}
        return self._at("step", held, gradients=gradients, **more)

    def _stay_narrow(self) -> bool:
        """Whether the step takes gradients as they were added up, without a copy in FP32."""
        return self.system.optimizer == "coat" or self.system.bf16_masters or self.layout.fp32_gradients

    def _in_one_piece(self) -> float:
        if self.layout.host != "deepspeed" or self.layout.stage != 1 or self.on_cpu or self.in_one_buffer:
            return 0
        return (self.gradient if self._stay_narrow() else FP32) * self.part

    def _stepped_together(self) -> float:
        """Elements of this GPU's part that ZeRO-3 steps at once: whole parameters until there are enough."""
        sizes, layout = self.sizes, self.layout
        found = 0.0
        for numel in [sizes.table, *self._large(), sizes.table]:
            found += numel / layout.tensor / layout.data
            if found >= layout.sub_group:
                break
        return found
