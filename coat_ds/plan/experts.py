"""MoE feed-forward layers, where each token uses a few experts: their sizes, and what they save for backward.

Tokens are taken to be spread evenly over experts. A token has a row at each of its experts. Bytes that a
row keeps, with h hidden channels, f after the expert's activation, u before it (2 f where it is
gated), and g = 17/16, a byte and a group's share of its scale:

| | BF16 | COAT, one after another | COAT, grouped |
|---|---|---|---|
| transformers | 2 (2 h + 4 f) | g u + 3 h | g u |
| Megatron, gated | 2 (h + u + f) | g u + 3 h | g (u + h) |
| Megatron, not gated | 2 (h + u + 2 f) | g u + 3 h | g (u + h) |

The router reads the norm's output, so that COAT keeps it, too: 2 h a token. Probabilities and orders take a
few bytes for each expert of a layer and each row; with a router's losses or in FP32 more, which is not
counted.
"""

from dataclasses import dataclass

from coat_ds.plan.layout import Layout

BF16, FP32, INT64 = 2, 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What stands in the place of a plain feed-forward layer. Sizes are in elements of h hidden channels."""

    count: int
    """Experts in a layer."""
    used: int
    """Experts that a token takes."""
    ffn: int
    """Channels between the two GEMMs of an expert."""
    where: tuple[bool, ...]
    """For each layer of the model, whether it has experts."""
    shared: int = 0
    """Channels of the shared expert, which every token uses."""
    shared_gate: bool = False
    """A GEMM with one column weighs the shared expert's output."""
    grouped: bool = False
    """COAT computes all experts in one grouped BF16 GEMM. Else one after another in FP8."""
    gated: bool = True
    """An expert has two GEMMs before its activation and one after it; else one and one."""
    biases: bool = False
    """The GEMMs have biases."""

    @property
    def layers(self) -> int:
        """Layers that have experts."""
        return sum(self.where)

    @property
    def fc1(self) -> int:
        """Columns before an expert's activation function."""
        return (1 + self.gated) * self.ffn

    @property
    def _products(self) -> int:
        return 2 + self.gated

    def router(self, h: int) -> int:
        """Elements of what every GPU has whole, whatever the tensor parallel size."""
        return h * (self.count + self.shared_gate)

    def routed(self, h: int) -> int:
        """Elements of all experts of a layer but the shared ones."""
        return h * self._products * self.count * self.ffn

    def matrices(self, h: int) -> int:
        """Elements of the matrices of a feed-forward layer, with the router's."""
        return self.router(h) + self.routed(h) + h * self._products * self.shared

    def converted_routed(self, h: int) -> int:
        """Those of `routed` that COAT multiplies in FP8."""
        return 0 if self.grouped else self.routed(h)

    def converted_matrices(self, h: int) -> int:
        """Those of `matrices` that COAT multiplies in FP8."""
        return self.converted_routed(h) + h * self._products * self.shared

    def products(self, h: int) -> int:
        """Those that a token is multiplied with."""
        return self.router(h) + h * self._products * (self.used * self.ffn + self.shared)

    def converted_products(self, h: int) -> int:
        """Those that a token is multiplied with in FP8."""
        return h * self._products * (self.used * self.ffn * (not self.grouped) + self.shared)

    def modules(self, h: int) -> list[list[int]]:
        """Elements of parameters by module: router, experts, what is shared."""
        both = [[self.count * self.fc1 * h, self.count * self.ffn * h]]
        shared = [[self.shared * h]] * self._products if self.shared else []
        return [[self.router(h)], *both, *shared]


def saved_by_transformers(experts: Experts, h: int, grouped: float | None) -> float:
    """Bytes that a layer's experts and router keep for a token. `grouped`: COAT's of a code; None is BF16."""
    # all probabilities, and the order that tokens are brought into, which most keep in several ways
    ways = 2 if grouped is not None and experts.grouped else 4
    routing = FP32 * experts.count + ways * INT64 * experts.used
    if grouped is None:
        # input, output, gate and up, the activation's output and the product
        return routing + BF16 * experts.used * (2 * h + 4 * experts.ffn) + BF16 * 4 * experts.shared
    # the router reads the norm's output, which others make again
    routing += BF16 * h + grouped * 2 * experts.shared
    # one by one: inputs in FP8, and outputs, which are weighted
    others = 0 if experts.grouped else (1 + BF16) * h
    return routing + experts.used * (grouped * 2 * experts.ffn + others)


def saved_by_megatron(experts: Experts, h: int, grouped: float | None, layout: Layout) -> float:
    """As `saved_by_transformers`, on a GPU, for a token of a micro-batch. The norm's output aside in BF16.

    Megatron's own layers keep the same in experts one after another and in Transformer Engine's grouped ones.
    """
    tensor, between, expert_tensor = layout.tensor, layout.between, layout.of_experts_tensor
    # a GPU has the rows of all that share an expert's channels, and its part of these
    rows = experts.used * expert_tensor / tensor
    f, u = experts.ffn / expert_tensor, experts.fc1 / expert_tensor
    shared, shared_u = experts.shared / tensor, (1 + experts.gated) * experts.shared / tensor
    # a token's choice, and the softmax over it; of a GPU's experts the map and the probabilities; a row's
    # token and its weight
    kept = (INT64 + FP32) * experts.used / tensor
    kept += (1 + BF16) * experts.count * expert_tensor / tensor + (INT64 + BF16) * rows
    if experts.shared_gate:
        # what is scaled, and by what
        kept += BF16 * (h + 1) / between
    if grouped is None:
        # a gate is fused with the row's weight; of other activations the output is kept, too
        behind = f if experts.gated else 2 * f
        return kept + rows * BF16 * (h + u + behind) + BF16 * (shared_u + shared)
    # the router reads the norm's output, which shared experts make again
    kept += BF16 * h / between + grouped * shared_u
    if not experts.grouped:
        # inputs in FP8, and outputs, which are weighted
        return kept + rows * (grouped * u + (1 + BF16) * h)
    if experts.biases:
        # a row's expert, and its weights of all of the GPU's
        kept += rows * (INT64 + BF16 * experts.count / layout.expert)
    return kept + rows * grouped * (u + h)
