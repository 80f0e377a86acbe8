"""Expert layers of transformers' models: all experts of a layer in grouped FP8 GEMMs, saved in 8 bits."""

import torch

from coat_ds.config import ActivationsConfig
from coat_ds.layers.detection.probe import activation_kind, close, run
from coat_ds.layers.modules.converted_forward import ConvertedForward, is_plain
from coat_ds.layers.modules.hooks import has_user_hooks
from coat_ds.optim.shards import shape_of
from coat_kernels.experts import ExpertsState, KernelGate, TorchGate, grouped_experts
from coat_kernels.experts.reference import gate_reference
from coat_kernels.fp8 import ALIGNMENT

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


def _kernel_gate(module: torch.nn.Module, saved_format: str) -> KernelGate | None:
    """The kernels' gate that computes what the module's does: an activation times up, or GPT-OSS's gate. None
    if there is none."""
    if type(module)._apply_gate.__name__ == "_default_apply_gate":
        kind = activation_kind(module.act_fn) if _is(module, "is_concatenated") else None
        return kind and KernelGate(kind, saved_format)
    limit = getattr(module, "limit", None)
    if not isinstance(limit, float | int):
        return None
    interleaved = not _is(module, "is_concatenated")
    gate = KernelGate("quick_gelu", saved_format, limit=float(limit), offset=1.0, interleaved=interleaved)
    # all pairs of values below and above the limits
    steps = torch.linspace(-2, 2, 33) * limit
    parts = steps.repeat(33), steps.repeat_interleave(33)
    both = (torch.stack(parts, 1).flatten() if interleaved else torch.cat(parts))[None]
    same = close(run(module._apply_gate, both.clone()), gate_reference(*parts, gate=gate)[0][None])
    return gate if same else None


def why_not(module: torch.nn.Module, dispatched: bool) -> str | None:
    """Why an expert layer is not converted; None if it can be. dispatched: whether its forward on the
    instance is expert parallelism's."""
    cls = type(module)
    # transformers' wrapper, which chooses the implementation of experts
    wrapped = getattr(cls.forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe"
    if not hasattr(cls, "_apply_gate") or not _is(module, "has_gate") or not wrapped:
        return "experts with a forward of their own"
    patched = [name for name in PATCHED if name in module.__dict__ and not (dispatched and name == "forward")]
    if patched:
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
    if h % ALIGNMENT or f % ALIGNMENT:
        return f"experts of {h} x {f}, not multiples of {ALIGNMENT}"
    return None


class Fp8Experts(ConvertedForward):
    """All experts of a layer in grouped FP8 GEMMs: gate_up_proj [e, 2 f, h], down_proj [e, h, f] and a gate.
    Supports biases, transposed weights and gates of the model."""

    # whether indices name experts of this rank only, also under expert parallelism
    local_rows = False

    def __init__(self, module: torch.nn.Module, activations: ActivationsConfig):
        super().__init__(module, activations)
        # a plain function in LFM2; GPT-OSS has none
        self.act = getattr(module, "act_fn", None)
        self.gate = _kernel_gate(module, self.saved_format)
        self.state = ExpertsState(activations.weight_cache, activations.fast_accumulation != "none")

    def shown(self) -> str:
        return "coat=FP8, 8-bit saved"

    def check_tensor(self, x: torch.Tensor) -> bool:
        """False also if indices may name experts of other ranks, under tensor parallelism, where a rank holds
        a part of each expert, and if the activation or the gate has hooks or was replaced, since the kernels
        call neither."""
        module, act = self.module, self.act
        if self.gate is not None:
            hooked = isinstance(act, torch.nn.Module) and has_user_hooks(act)
            if hooked or getattr(module, "act_fn", None) is not act or "_apply_gate" in module.__dict__:
                return False
        whole = self.local_rows or not getattr(module, "_is_expert_parallel", False)
        whole = whole and is_plain(module.gate_up_proj) and is_plain(module.down_proj)
        return whole and x.numel() > 0 and super().check_tensor(x)

    # a gate that is differentiated in backward cannot be traced, nor can predicted scales
    @torch.compiler.disable
    def compute(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [t, h], the experts of each token and their weights [t, k] -> [t, h]."""
        module = self.module
        if not self.check_tensor(hidden_states):
            return self.stock(hidden_states, top_k_index, top_k_weights)
        biases = {}
        if _is(module, "has_bias"):
            biases = {"gate_up_bias": module.gate_up_proj_bias, "down_bias": module.down_proj_bias}
        y = grouped_experts(
            hidden_states.to(torch.bfloat16),
            top_k_index,
            top_k_weights,
            module.gate_up_proj,
            module.down_proj,
            self.gate or TorchGate(module._apply_gate, saved_format=self.saved_format),
            transposed=_is(module, "is_transposed"),
            state=self.state,
            **biases,
        )
        return y.to(hidden_states.dtype)
