"""The sizes of a decoder-only transformer."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coat_ds.plan.errors import PlanError
from coat_ds.plan.experts import Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A decoder-only transformer.

    Raises PlanError for a size that is not a whole number above 0.
    """

    layers: int
    hidden: int
    """Channels of the residual stream."""
    ffn: int
    """Channels between the two GEMMs of a feed-forward layer."""
    heads: int
    """Query heads."""
    groups: int
    """Key and value heads."""
    head_dim: int
    vocabulary: int
    gated: bool = True
    """The feed-forward layer's first GEMM has twice `ffn` columns, as SwiGLU's."""
    tied: bool = False
    """Embedding and head are one matrix."""
    head_norms: bool = False
    """Queries and keys are normed, head by head, by RMSNorm."""
    counted: bool = True
    """The bytes that such layers save in BF16 were measured. Otherwise Llama's are assumed."""
    maker: str = "megatron"
    """The package of the BF16 layers: "megatron" (megatron-core) or "transformers"."""
    other_parameters: int = 0
    """Parameters that the sizes above do not give: biases, positions, norms of queries and keys."""
    outside: int = 0
    """The part of `other_parameters` outside of the decoder, as of a vision encoder, which is not planned."""
    experts: Experts | None = None
    """The experts, which replace the feed-forward of `ffn` in some or all layers."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 1 if field.default is dataclasses.MISSING else 0
            if field.type is int and (type(value) is not int or value < least):
                raise PlanError(
                    f"{field.name}: expected a whole number above 0, found {value!r}. Correct it."
                )

    @property
    def queries(self) -> int:
        """Channels of all query heads, and of attention's output."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Channels of queries, keys and values together."""
        return (self.heads + 2 * self.groups) * self.head_dim

    @property
    def fc1(self) -> int:
        """Columns before the activation function."""
        return (1 + self.gated) * self.ffn

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def norms(self) -> int:
        """Elements of the norms of layers, and of the last one."""
        return (2 * self.layers + 1) * self.hidden

    @property
    def parameters(self) -> int:
        tables = self.table * (1 if self.tied else 2)
        return round(self.layers * self.layer_matrices) + tables + self.norms + self.other_parameters

    def mean(self, dense: float, sparse: float) -> float:
        """Mean over the layers of a value: `dense` without experts in a layer, `sparse` with them."""
        if self.experts is None:
            return dense
        share = self.experts.layers / self.layers
        return (1 - share) * dense + share * sparse

    @property
    def recomputes_attention(self) -> float:
        """The share of layers in which COAT can recompute attention: all but Megatron's with experts."""
        return self.mean(1, self.maker == "transformers")

    @property
    def expert_weights(self) -> int:
        """Elements of all experts' matrices in the model, which expert parallelism divides."""
        return self.experts.layers * self.experts.weights(self.hidden) if self.experts else 0

    def of_stage(self, stages: int) -> "Sizes":
        """With the layers of one of `stages` equal parts."""
        experts = self.experts and dataclasses.replace(self.experts, layers=self.experts.layers // stages)
        return dataclasses.replace(self, layers=self.layers // stages, experts=experts)

    @property
    def layer_matrices(self) -> float:
        """Elements of a layer's matrices, mean over the layers."""
        return self._of_a_layer(Experts.matrices)

    @property
    def converted_matrices(self) -> float:
        """Elements of a layer's matrices that COAT multiplies in FP8."""
        return self._of_a_layer(Experts.converted)

    @property
    def active_matrices(self) -> float:
        """Elements of a layer's matrices that one token uses."""
        return self._of_a_layer(Experts.active)

    @property
    def converted_active(self) -> float:
        """Elements of a layer's matrices that one token uses in COAT's FP8 GEMMs."""
        return self._of_a_layer(Experts.converted_active)

    def _of_a_layer(self, of_experts: Callable[[Experts, int], int]) -> float:
        """Elements of a layer's attention and feed-forward, mean over the layers."""
        attention, dense = self.hidden * (self.qkv + self.queries), self.hidden * (self.fc1 + self.ffn)
        return attention + self.mean(dense, of_experts(self.experts, self.hidden) if self.experts else 0)

    @property
    def active_ffn(self) -> float:
        """Channels between the GEMMs of the feed-forward layers that one token passes."""
        sparse = self.experts.used * self.experts.ffn + self.experts.shared if self.experts else 0
        return self.mean(self.ffn, sparse)

    @property
    def widest_ffn(self) -> int:
        """Channels between the GEMMs of the widest feed-forward layer that all tokens pass; 0 without one."""
        return max(self.ffn * bool(self.mean(1, 0)), self.experts.shared if self.experts else 0)

    @property
    def largest_module(self) -> int:
        """Elements of the largest module of a layer, whose weights ZeRO-3 gathers together."""
        apart = self.maker == "transformers"
        columns = max(self.queries, self.ffn) if apart else max(self.qkv, self.fc1)
        experts = self.experts.weights(self.hidden) if self.experts else 0
        return max(self.hidden * columns, experts)


def from_shape(values: Mapping, vocabulary: int | None) -> Sizes:
    """The sizes in a file of configs/, which has Megatron's names and no vocabulary."""
    if vocabulary is None:
        raise PlanError("vocabulary: a file of sizes names none. Give --vocabulary, 32000 for Llama-2.")
    for key in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"):
        _positive(key, values.get(key))
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads:
        raise PlanError(
            f"num_attention_heads: {heads} does not divide hidden_size, {hidden}. Correct the file."
        )
    return Sizes(
        experts=_experts_of_shape(values),
        layers=values["num_layers"],
        hidden=hidden,
        ffn=values["ffn_hidden_size"],
        heads=heads,
        groups=values.get("num_query_groups") or heads,
        head_dim=hidden // heads,
        vocabulary=vocabulary,
        tied=not values.get("untie_embeddings_and_output_weights", True),
    )


def _positive(key: str, found: Any, most: float = math.inf) -> int:
    """`found` if it is a whole number from 1 to `most`; else raises PlanError."""
    if type(found) is not int or not 1 <= found <= most:
        limit = "above 0" if most == math.inf else f"from 1 to {most}"
        raise PlanError(f"{key}: expected a whole number {limit}, found {found!r}. Correct the file.")
    return found


def _experts_of_shape(values: Mapping) -> Experts | None:
    """The experts by Megatron's arguments, with Megatron's defaults. Raises PlanError for impossible ones."""
    if values.get("num_experts") is None:
        return None
    count = _positive("num_experts", values["num_experts"])
    every, layers = values.get("moe_layer_freq", 1), range(values["num_layers"])
    if isinstance(every, list) and len(every) == len(layers):
        sparse = sum(map(bool, every))
    else:
        sparse = len(layers[:: _positive("moe_layer_freq", every)])
    shared = values.get("moe_shared_expert_intermediate_size")
    return Experts(
        layers=sparse,
        count=count,
        used=_positive("moe_router_topk", values.get("moe_router_topk", 2), count),
        ffn=_positive("moe_ffn_hidden_size", values.get("moe_ffn_hidden_size") or values["ffn_hidden_size"]),
        shared=_positive("moe_shared_expert_intermediate_size", shared) if shared else 0,
        shared_gate=bool(values.get("moe_shared_expert_gate")),
    )
