"""Bytes that forward and backward of a micro-batch take on a GPU.

t tokens of a micro-batch for each GPU; h hidden channels, f of the feed-forward layer, u before its
activation (2 f where it is gated), V vocabulary:

- what layers save for backward: `saved.py`;
- loss: logits in BF16 and FP32, 6 t V, and the inputs of the last norm and of the head;
- layers: gradients of hidden states and of the activation, 2 (h + u) t and with the same number of bytes of
  FP8 copies for GEMMs; with experts also the gradients of all its weights, where each GEMM has one tensor.
"""

import dataclasses

from coat_ds.plan.experts import BF16, FP32
from coat_ds.plan.layout import Layout
from coat_ds.plan.saved import saved_per_token
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System
from coat_kernels.graphs import max_graphed_work

# tensors that a recorded layer's graphs are handed over in: its input, and two gradients
GRAPH_BUFFERS = 3


class Passes:
    """Forward and backward of a micro-batch.

    in_flight: micro-batches whose activations are saved at once. gradients_move: each gradient leaves its
        parameter during backward, so that graphs of larger layers fit.
    """

    def __init__(self, sizes: Sizes, layout: Layout, system: System, in_flight: int, gradients_move: bool):
        self.sizes, self.layout, self.system = sizes, layout, system
        # bytes of hidden states between layers
        self.hidden = BF16 * layout.tokens * sizes.hidden
        self._layer_matrices = sizes.layer_matrices / layout.tensor
        self.has_graphs = self._has_graphs(gradients_move)
        # bytes that all layers save, in graphs or outside of them
        saved = sizes.layers * layout.tokens * saved_per_token(sizes, system) + self._positions()
        self.saved = 0 if self.has_graphs else in_flight * saved
        self.graphs = saved + GRAPH_BUFFERS * self.hidden if self.has_graphs else 0

    def _has_graphs(self, gradients_move: bool) -> bool:
        """Whether layers are recorded as CUDA graphs, as fused layers can; these have no experts."""
        system, layout = self.system, self.layout
        fused = system.layers == "coat" and system.recompute == "none" and self.sizes.experts is None
        if not fused or layout.stage == 3:
            return False
        if (wanted := system.coat.activations.cuda_graphs) is not None:
            return wanted
        work = layout.tensor * layout.tokens * self._layer_matrices
        return work <= max_graphed_work(layout.tensor, gradients_move)

    def _positions(self) -> float:
        """Bytes of cosine and sine, in FP32 once for all; in Megatron's own layers twice each."""
        numel = self.layout.sequence * self.sizes.head_dim * 2
        own = self.system.layers != "coat" and self.sizes.maker == "megatron"
        return (
            self.sizes.layers * 2 * BF16 * numel if own and self.system.recompute != "full" else FP32 * numel
        )

    def logits(self) -> float:
        """Bytes of logits, and of what else the head saves and takes."""
        logits = self.layout.tokens * self.sizes.vocabulary
        if self.sizes.maker == "transformers":
            # logarithms of FP32 logits, and both kinds of logits; backward has two gradients of the logits
            return 4 * self.hidden + 12 * logits
        fused = self.hidden if self.system.layers == "coat" else 0
        return 2 * self.hidden + 6 * logits + fused

    def temporaries(self) -> float:
        """Bytes of gradients within a layer, at the activation, where they are largest."""
        sizes, layout, system = self.sizes, self.layout, self.system
        if self.has_graphs:
            # the graphs' own memory; results cross in buffers
            return self.hidden + BF16 * self._layer_matrices
        ffn = BF16 * sizes.widest_ffn * layout.tokens
        wide = (1 + sizes.gated) * ffn
        if system.layers != "bf16" or sizes.maker == "transformers":
            # the GEMM's gradient, and the activation's in FP8 by rows and by columns; or gradients of the
            # activation's output and of its other factor
            wide += ffn
        found = self.hidden + max(wide, self._of_experts())
        if system.recompute != "none":
            whole = dataclasses.replace(system, recompute="none")
            found += layout.tokens * saved_per_token(sizes, whole)
        elif system.recomputes_attention and sizes.recomputes_attention:
            # at attention: recomputed q, k, v and output, and their gradients
            again = 2 * BF16 * (sizes.qkv + sizes.queries) * layout.tokens
            found = max(found, self.hidden + again)
        return found

    def _of_experts(self) -> float:
        """Bytes of gradients of a layer's experts: of gate and up, of their input, and of all their weights,
        which are one tensor for each GEMM."""
        experts, h = self.sizes.experts, self.sizes.hidden
        if experts is None:
            return 0
        activations = self.layout.tokens * experts.used * (2 * experts.ffn + h)
        weights = 3 * experts.count * experts.ffn * h
        return BF16 * (activations + weights / self.layout.tensor / self.layout.expert)
