"""Expert layers of transformers' models: few experts run one after another in FP8, many in one grouped BF16
GEMM. Both save the activation's input in 8 bits.
"""

from collections.abc import Callable

import torch

from coat_ds.config import ActivationsConfig
from coat_ds.layers.detection.probe import activation_kind, shape_of
from coat_ds.layers.modules.formats import formats
from coat_ds.layers.modules.hooks import is_watched
from coat_ds.layers.modules.replaced import Replaced, is_plain
from coat_kernels.activation import activation
from coat_kernels.autograd.origin import origin_of
from coat_kernels.experts import KernelGate, OwnGate, grouped_experts
from coat_kernels.linear import fp8_linear
from coat_kernels.tensorwise import PredictedScale
from coat_kernels.weights import WeightCache

# attributes of transformers' expert classes, with their defaults; older releases set only other values
_TRAITS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}
# methods that may be replaced on one instance; the kernels do not call them
PATCHED = ("forward", "_apply_gate")
# with more experts, launching one after another takes longer than one grouped BF16 GEMM
MOST_EXPERTS = 16


def is_experts(module: torch.nn.Module) -> bool:
    """Whether `module` holds the weights of all experts of a layer, as transformers' expert layers do."""
    weights = module._parameters.get("down_proj"), module._parameters.get("gate_up_proj")
    return all(w is not None and len(shape_of(w)) == 3 for w in weights)


def _is(module: torch.nn.Module, trait: str) -> bool:
    return getattr(module, trait, _TRAITS[trait])


def _sizes(module: torch.nn.Module) -> tuple[int, int, int, int]:
    """Number of experts, h, f, and the columns of gate and up."""
    count, *down = shape_of(module.down_proj)
    _, *both = shape_of(module.gate_up_proj)
    h, f = reversed(down) if _is(module, "is_transposed") else down
    return count, h, f, both[1] if _is(module, "is_transposed") else both[0]


def _kind(module: torch.nn.Module) -> str | None:
    """The kernels' name of its activation, if gate and up are concatenated and nothing else is computed."""
    stock_gate = type(module)._apply_gate.__name__ == "_default_apply_gate"
    return activation_kind(module.act_fn) if stock_gate and _is(module, "is_concatenated") else None


def _asks_interface(forward: Callable) -> bool:
    """Whether `forward` is transformers' wrapper that chooses the implementation of experts."""
    return getattr(forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe"


def runs_one_by_one(module: torch.nn.Module) -> bool:
    plain = not _is(module, "has_bias") and not _is(module, "is_transposed") and _kind(module) is not None
    return plain and _sizes(module)[0] <= MOST_EXPERTS


def why_not(module: torch.nn.Module, group_size: int) -> str | None:
    """Why an expert layer is not converted; None if it can be. group_size: of saved activations."""
    cls = type(module)
    if not hasattr(cls, "_apply_gate") or not _is(module, "has_gate") or not _asks_interface(cls.forward):
        return "experts with a forward of their own"
    if patched := [name for name in PATCHED if name in module.__dict__]:
        return f"experts with a replaced {' and '.join(patched)}"
    names = {"down_proj", "gate_up_proj"}
    if _is(module, "has_bias"):
        names |= {f"{name}_bias" for name in names}
    if set(module._parameters) != names:
        return "experts with other weights than gate_up_proj and down_proj"
    if _is(module, "has_post_expert_norm"):
        return "experts with norms"
    _, h, f, both = _sizes(module)
    if both != 2 * f:
        return "experts whose gate does not halve"
    # backward recomputes the gate's output from whole groups
    multiple = 16 if runs_one_by_one(module) else group_size
    if h % 16 or f % multiple:
        return f"experts of {h} x {f}, not multiples of 16 and {multiple}"
    return None


def forward_of(module: torch.nn.Module, activations: ActivationsConfig) -> "_Experts":
    """The new forward of an expert layer that can be converted."""
    return (Fp8Experts if runs_one_by_one(module) else GroupedExperts)(module, activations)


class _Experts(Replaced):
    """The forward of an expert layer: gate_up_proj [e, 2 f, h], down_proj [e, h, f] and a gate."""

    kind = "feed_forward"

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig):
        super().__init__(module, activations)
        self.function = _kind(module)
        # a plain function in LFM2; GPT-OSS has none
        self.act = getattr(module, "act_fn", None)
        self.kept = {"group_size": activations.group_size, "saved_format": activations.saved_format}

    def takes(self, x: torch.Tensor) -> bool:
        """False also under expert parallelism, where indices may name experts of other ranks, under tensor
        parallelism, where a rank holds a part of each expert, and if the activation or the gate has hooks or
        was replaced, since the kernels call neither."""
        module, act = self.module, self.act
        if self.function is not None:
            watched = isinstance(act, torch.nn.Module) and is_watched(act)
            if watched or getattr(module, "act_fn", None) is not act or "_apply_gate" in module.__dict__:
                return False
        whole = not getattr(module, "_is_expert_parallel", False)
        whole = whole and is_plain(module.gate_up_proj) and is_plain(module.down_proj)
        return whole and x.numel() > 0 and super().takes(x)


class GroupedExperts(_Experts):
    """All experts in one grouped BF16 GEMM. Supports biases, transposed weights and gates of the model."""

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig):
        super().__init__(module, activations)
        self.left = {"linear": f"{_sizes(module)[0]} experts multiply in one grouped BF16 product"}

    def compute(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [t, h], the experts of each token and their weights [t, k] -> [t, h]."""
        x, module = hidden_states, self.module
        # torch.compile cannot trace a gate that is differentiated in backward
        compiles = self.function is None and torch.compiler.is_compiling()
        if compiles or not self.takes(x):
            return self.stock(hidden_states, top_k_index, top_k_weights)
        gate = OwnGate(module._apply_gate, **self.kept)
        if self.function is not None:
            gate = KernelGate(self.function, **self.kept)
        biases = {}
        if _is(module, "has_bias"):
            biases = {"gate_up_bias": module.gate_up_proj_bias, "down_bias": module.down_proj_bias}
        # BF16 for parameters of any dtype, as in FP8 layers
        x, *weights = (t.to(torch.bfloat16) for t in (x, module.gate_up_proj, module.down_proj))
        if _is(module, "is_transposed"):
            weights = [weight.transpose(1, 2) for weight in weights]
        y = grouped_experts(x, top_k_index, top_k_weights, *weights, gate, **biases)
        return y.to(hidden_states.dtype)


class Fp8Experts(_Experts):
    """One expert after another, in FP8."""

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig):
        super().__init__(module, activations)
        chosen = formats(activations)
        # each GEMM of each expert has scales and a cache of its own
        self.linears = [
            [
                {
                    "formats": chosen,
                    "cache": WeightCache(activations.weight_cache),
                    "x_scale": PredictedScale(chosen.forward),
                    "grad_scale": PredictedScale(chosen.backward),
                }
                for _ in range(2)
            ]
            for _ in range(shape_of(module.down_proj)[0])
        ]

    def compute(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [t, h], the experts of each token and their weights [t, k] -> [t, h]."""
        x, module = hidden_states, self.module
        if not self.takes(x):
            return self.stock(hidden_states, top_k_index, top_k_weights)
        (tokens, k), count = top_k_index.shape, len(self.linears)
        order = top_k_index.flatten().argsort(stable=True)
        of_each = torch.bincount(top_k_index.flatten(), minlength=count).tolist()
        # with unbind, autograd stacks the gradients of all experts once
        experts = zip(
            x[order // k].split(of_each),
            module.gate_up_proj.unbind(),
            module.down_proj.unbind(),
            self.linears,
            strict=True,
        )
        outputs = [self._expert(*expert) for expert in experts]
        y = torch.cat(outputs)
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        weighted = y[back].view(tokens, k, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(x.dtype)

    def _expert(
        self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, options: list
    ) -> torch.Tensor:
        both = fp8_linear(x, gate_up, **options[0])
        if not both.numel():
            # an expert without tokens: its weights still get gradients, which are zero
            return fp8_linear(both[:, : both.shape[1] // 2], down, **options[1])
        product = activation(both, self.function, gated=True, **self.kept)
        return fp8_linear(product, down, origin=origin_of(product), **options[1])
