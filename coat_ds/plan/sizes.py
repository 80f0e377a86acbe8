"""The sizes of a decoder-only transformer."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coat_ds.plan.errors import PlanError
from coat_ds.plan.experts import Experts

MAKERS = ("megatron", "transformers")
# what Megatron calls them
MEGATRON = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads",
}
# a decoder whose parameters differ by more from those of its layers and tables has other parts
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A decoder-only transformer.

    Raises PlanError for a size that is not a whole number above 0.
    """

    layers: int
    hidden: int
    """Channels of the residual stream."""
    ffn: int
    """Channels between the two products of a feed-forward layer."""
    heads: int
    """Query heads."""
    groups: int
    """Key and value heads."""
    head_dim: int
    vocabulary: int
    gated: bool = True
    """The feed-forward layer's first product has twice `ffn` columns, as SwiGLU's."""
    tied: bool = False
    """Embedding and head are one matrix."""
    head_norms: bool = False
    """Queries and keys are normed, head by head, by RMSNorm."""
    counted: bool = True
    """What layers of this kind save in BF16 was counted. Else they are taken for Llama's."""
    maker: str = "megatron"
    """Whose layers BF16 is: "megatron" (megatron-core's) or "transformers" (Hugging Face's)."""
    other_parameters: int = 0
    """Parameters that the sizes above do not give: biases, positions, norms of queries and keys."""
    beside: tuple[str, ...] = ()
    """Names of the model's other parts, which are not planned."""
    experts: Experts | None = None
    """In place of feed-forward layers of `ffn`, in the layers that have them."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (
                field.type is int
                and field.name != "other_parameters"
                and (type(value) is not int or value < 1)
            ):
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
    def attention_matrices(self) -> int:
        """Elements of the matrices of a layer's attention."""
        return self.hidden * (self.qkv + self.queries)

    @property
    def feed_forward_matrices(self) -> int:
        """Elements of the matrices of a feed-forward layer without experts."""
        return self.hidden * (self.fc1 + self.ffn)

    def mean(self, dense: float, sparse: float) -> float:
        """The mean over the layers of what is `dense` in one without experts, `sparse` in one with them."""
        if self.experts is None:
            return dense
        share = self.experts.layers / self.layers
        return (1 - share) * dense + share * sparse

    @property
    def attends_again(self) -> float:
        """The share of layers in which COAT can make attention again: fused blocks, which have no experts."""
        return self.mean(1, 0)

    def _of_a_layer(self, of_experts: Callable[[Experts, int], int]) -> float:
        """Elements of a layer's attention and feed-forward, mean over the layers."""
        sparse = of_experts(self.experts, self.hidden) if self.experts else 0
        return self.attention_matrices + self.mean(self.feed_forward_matrices, sparse)

    @property
    def layer_matrices(self) -> float:
        """Elements of a layer's matrices, mean over the layers."""
        return self._of_a_layer(Experts.matrices)

    @property
    def converted_matrices(self) -> float:
        """Those of them that COAT multiplies in FP8."""
        return self._of_a_layer(Experts.converted_matrices)

    @property
    def layer_products(self) -> float:
        """Those that a token is multiplied with."""
        return self._of_a_layer(Experts.products)

    @property
    def converted_products(self) -> float:
        """Those that a token is multiplied with in FP8, by COAT."""
        return self._of_a_layer(Experts.converted_products)

    def layer_on_gpu(self, tensor: int, expert_shares: int) -> tuple[float, float]:
        """Elements of a layer's matrices on a GPU, mean over the layers: of routed experts, which
        `expert_shares` GPUs divide, and of all other matrices."""
        routed, router = self._of_experts(Experts.routed), self._of_experts(Experts.router)
        return routed / expert_shares, (self.layer_matrices - routed - router) / tensor + router

    def converted_on_gpu(self, tensor: int, expert_shares: int) -> float:
        """Those of them that COAT multiplies in FP8."""
        routed = self._of_experts(Experts.converted_routed)
        return routed / expert_shares + (self.converted_matrices - routed) / tensor

    def _of_experts(self, elements: Callable[[Experts, int], int]) -> float:
        return self.mean(0, elements(self.experts, self.hidden)) if self.experts else 0

    def part(self, layers: slice) -> "Sizes":
        """The sizes of a model with some of the layers, between the same embedding and head."""
        experts, count = self.experts, len(range(self.layers)[layers])
        if experts is not None:
            where = experts.where[layers]
            experts = dataclasses.replace(experts, where=where) if any(where) else None
        return dataclasses.replace(self, layers=count, experts=experts)

    @property
    def active_ffn(self) -> float:
        """Channels between the products of a feed-forward layer that a token takes."""
        sparse = self.experts.used * self.experts.ffn + self.experts.shared if self.experts else 0
        return self.mean(self.ffn, sparse)

    @property
    def widest_ffn(self) -> int:
        """Channels between the products of the widest feed-forward layer that all tokens take; 0 of none."""
        return max(self.ffn * bool(self.mean(1, 0)), self.experts.shared if self.experts else 0)

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        tables = self.table * (1 if self.tied else 2)
        norms = (2 * self.layers + 1) * self.hidden
        return round(self.layers * self.layer_matrices) + tables + norms + self.other_parameters

    def stack(self) -> list[list[list[int]]]:
        """Elements of the parameters of each layer's modules, in the order in which forward uses them."""
        h = self.hidden
        if self.maker == "megatron":
            attention, first = [[h * self.qkv]], [[h * self.fc1]]
        else:
            kv = h * self.groups * self.head_dim
            attention, first = [[h * self.queries], [kv], [kv]], [[h * self.ffn]] * (1 + self.gated)
        front = [[h], *attention, [self.queries * h], [h]]
        dense = [*front, *first, [self.ffn * h]]
        if self.experts is None:
            return self.layers * [dense]
        sparse = [*front, *self.experts.modules(h)]
        return [sparse if has_experts else dense for has_experts in self.experts.where]


def from_shape(values: Mapping, vocabulary: int | None) -> Sizes:
    """Of a file of configs/ (`num_layers`, `hidden_size`, ...), which names no vocabulary."""
    if vocabulary is None:
        raise PlanError("vocabulary: a file of sizes names none. Give --vocabulary, 32000 for Llama-2.")
    sizes = {name: _whole(values, key) for name, key in MEGATRON.items()}
    untied = values.get("untie_embeddings_and_output_weights", True)
    groups = values.get("num_query_groups") or sizes["heads"]
    return with_head_dim(**sizes, groups=groups, head_dim=None, vocabulary=vocabulary, tied=not untied)


def with_head_dim(*, head_dim: int | None, heads: int, hidden: int, **sizes) -> Sizes:
    """`Sizes`, where head_dim None is hidden / heads. Raises PlanError if that is no whole number."""
    if head_dim is None:
        if hidden % heads:
            raise PlanError(f"heads: {heads} does not divide hidden, {hidden}. Correct one of the two.")
        head_dim = hidden // heads
    return Sizes(head_dim=head_dim, heads=heads, hidden=hidden, **sizes)


def _whole(values: Mapping, key: str) -> int:
    value = values.get(key)
    if type(value) is not int or value < 1:
        found = "none" if value is None else repr(value)
        raise PlanError(f"{key}: expected a whole number above 0, found {found}. Correct the model's file.")
    return value


def check_parameters(name: str, found: int, sizes: Sizes) -> None:
    """Raises PlanError for a decoder, `name`, with other than the parameters of layers of its sizes."""
    if abs(found - sizes.parameters) > TOLERANCE * found:
        raise PlanError(
            f"{name}: has {found:,} parameters, and a decoder of its sizes {sizes.parameters:,}. It has "
            "layers that are not planned: hand over a Sizes to coat_ds.plan.predict instead."
        )
