"""Systems that are compared: BF16, configurations of COAT, and for benchmarks TransformerEngine's FP8."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from coat_ds.config import CoatConfig
from coat_kernels.codecs import CODECS, GROUP_SIZE, first_codec

# keys of DeepSpeed's section on BF16, which have to be true for masters in BF16
BF16_MASTERS = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
# bytes a parameter of TransformerEngine's moments in FP8: of both, each with the transposed copy that its
# tensors hold
_TE_MOMENTS = 4
# bytes of FP32 moments
FP32_MOMENTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Layers, optimizer, and what is recomputed."""

    name: str
    layers: str = "bf16"
    """"bf16", "transformer_engine" or "coat"."""
    optimizer: str = "adamw"
    """"adamw", "coat" or "transformer_engine"."""
    coat: CoatConfig = CoatConfig()
    """The block, where layers or optimizer are COAT's."""
    keys: Mapping = field(default_factory=dict)
    """The keys of the block without their defaults."""
    bf16_masters: bool = False
    """DeepSpeed keeps masters and gradients in BF16, and COAT steps them without more bits."""
    recompute: str = "none"
    """"none"; "full": only the input of each layer is saved; "mlp": only the feed-forward is recomputed."""
    offload: bool = False
    """DeepSpeed keeps masters and states in the CPU's memory."""
    release: bool = False
    """PyTorch without DeepSpeed, on one GPU: BF16 weights are the masters, with more bits in the states, and
    backward applies gradients (`CoatAdamW.release_gradients`)."""

    @property
    def has_units(self) -> bool:
        """ZeRO-3 gathers layers whole."""
        wanted = self.coat.zero3_layer_units
        return self.layers == "coat" if wanted is None else wanted

    @property
    def recomputes_attention(self) -> bool:
        """Backward recomputes attention, in layers that support it."""
        return self.layers == "coat" and self.coat.activations.attention_format == "recompute"

    @property
    def caches_weights(self) -> bool:
        """FP8 copies of weights are kept, by rows and by columns."""
        cached = self.layers == "coat" and self.coat.activations.weight_cache == "fp8"
        return cached or self.layers == "transformer_engine"

    @property
    def resident(self) -> float:
        """Bytes of states that stay on the GPU at most. The others are in host memory and stream through the
        GPU in the step."""
        offload = self.coat.optimizer.offload if self.optimizer == "coat" else "none"
        return {"none": math.inf, "cpu": 0}[offload] if isinstance(offload, str) else 1e9 * offload

    def state_bytes(self) -> float:
        """Bytes of the states of a compressed element; other elements keep FP32 moments."""
        if self.optimizer == "coat":
            second = CODECS[self.coat.optimizer.exp_avg_sq_format]
            first = first_codec(self.coat.optimizer.exp_avg_format, second)
            # with its share of scales
            return sum(codec.zeros(GROUP_SIZE).nbytes for codec in (first, second)) / GROUP_SIZE
        return _TE_MOMENTS if self.optimizer == "transformer_engine" else FP32_MOMENTS

    def block(self) -> dict:
        """The keys of a DeepSpeed JSON for this system, except batch sizes and ZeRO's stage."""
        found: dict = {"bf16": {"enabled": True}}
        if self.bf16_masters:
            found["bf16"] |= dict.fromkeys(BF16_MASTERS, True)
        if self.layers == "coat" or self.optimizer == "coat":
            found["coat"] = {"enabled": True, **self.keys}
        return found


def coat(name: str, keys: Mapping = MappingProxyType({}), **fields) -> System:
    """A system of COAT's layers and optimizer, with a block of these keys and `enabled`."""
    config = CoatConfig.from_dict({"enabled": True, **keys})
    return System(
        name=name,
        layers="coat" if config.activations.enabled else "bf16",
        optimizer="coat" if config.optimizer.enabled else "adamw",
        coat=config,
        keys=keys,
        **fields,
    )


# gradients in E4M3 make up for sums with fewer bits
FASTEST = {"weight_cache": "fp8", "fast_accumulation": "all", "backward_format": "e4m3"}
_STOCHASTIC = {"optimizer": {"bf16_params": "stochastic"}}
_STREAMED = {"optimizer": {"offload": "cpu"}}


@functools.cache
def all_systems() -> dict[str, System]:
    """By name: BF16, with and without recompute, and configurations of COAT."""
    eight_bits = {"activations": {"attention_format": "sqrt8"}}
    recomputed = {"activations": {"attention_format": "recompute"}}
    found = (
        System(name="BF16"),
        System(name="BF16, recompute", recompute="full"),
        coat("COAT"),
        coat("COAT, fastest", {"activations": FASTEST}),
        coat("COAT, 8-bit attention", eight_bits),
        coat("COAT, recomputed attention", recomputed),
        coat("COAT, smallest, recomputed attention", recomputed | _STOCHASTIC, bf16_masters=True),
        coat("COAT, recompute", {"fp8_activation_checkpointing": True}, recompute="full"),
        coat("COAT, streamed states", recomputed | _STREAMED, bf16_masters=True),
        coat("COAT, offload", recomputed, offload=True),
        coat("COAT, PyTorch, streamed states", recomputed | _STREAMED, bf16_masters=True, release=True),
    )
    return {system.name: system for system in found}


def without_fp8() -> dict[str, System]:
    """The systems for GPUs without FP8, where COAT only makes the optimizer's states smaller."""
    states = coat("COAT, states alone", {"activations": {"enabled": False}})
    return {name: system for name, system in all_systems().items() if system.optimizer == "adamw"} | {
        states.name: states
    }
