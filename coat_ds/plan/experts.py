"""Feed-forward layers of which each token takes a few experts, as transformers' mixtures have them."""

from dataclasses import dataclass

# a routed expert is gated: two products in front of its activation, one behind it
_PRODUCTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What stands in the place of a plain feed-forward layer. Sizes are in elements of h hidden channels."""

    count: int
    """Experts in a layer."""
    used: int
    """Experts that a token takes."""
    ffn: int
    """Channels between the two products of an expert."""
    layers: int
    """Layers that have experts: the last ones."""
    shared: int = 0
    """Channels of what every token takes beside them."""
    grouped: bool = False
    """COAT multiplies them in one grouped BF16 product. Else one after another in FP8."""

    def matrices(self, h: int) -> int:
        """Of a layer's feed-forward, the router's included."""
        return h * (self.count + _PRODUCTS * (self.count * self.ffn + self.shared))

    def converted_matrices(self, h: int) -> int:
        """Those of them that COAT multiplies in FP8."""
        return h * _PRODUCTS * (self.count * self.ffn * (not self.grouped) + self.shared)

    def products(self, h: int) -> int:
        """Those that a token is multiplied with."""
        return h * (self.count + _PRODUCTS * (self.used * self.ffn + self.shared))

    def converted_products(self, h: int) -> int:
        """Those that a token is multiplied with in FP8."""
        return h * _PRODUCTS * (self.used * self.ffn * (not self.grouped) + self.shared)

    def modules(self, h: int) -> list[list[int]]:
        """Elements of parameters by module: router, experts, what is shared."""
        both = [[2 * self.count * self.ffn * h, self.count * self.ffn * h]]
        return [[self.count * h], *both, *([[self.shared * h]] * _PRODUCTS if self.shared else [])]
