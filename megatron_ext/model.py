"""Llama-like GPT models of megatron-core, from a shape in a JSON file and a layer spec.

RMSNorm, SwiGLU, rotary positions, grouped queries; no biases, no dropout. `forward(tokens, positions, mask,
labels=...)` is Megatron's: tokens, positions and labels [b, s] int64, mask None, the losses [b, s] FP32.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig

from coat_ds.config import ActivationsConfig, read_object
from megatron_ext.layers.settings import set_activations


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama-like GPT.

    Raises ValueError for a size of another type or that is not positive, heads that do not divide the hidden
    size into an even number of channels, or key-value groups that do not divide the heads.
    """

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Width of the gated feed-forward product."""
    num_attention_heads: int
    """Query heads, each of hidden_size / num_attention_heads channels."""
    num_query_groups: int
    """Key and value heads; equal to num_attention_heads for plain multi-head attention."""
    rotary_base: int = 10000
    """Base period of the rotary positions."""
    layernorm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""
    untie_embeddings_and_output_weights: bool = True
    """Whether the output head has weights of its own."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, wanted = getattr(self, field.name), field.type
            # an integer is valid as a float; True is not valid as an integer
            if type(value) not in ((int, float) if wanted is float else (wanted,)):
                raise ValueError(f"{field.name}: expected {wanted.__name__}, found {value!r}")
            if wanted is not bool and not value > 0:
                raise ValueError(f"{field.name}: expected a number above 0, found {value}")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size: {self.hidden_size} does not split into {self.num_attention_heads} heads "
                "(num_attention_heads) of an even number of channels, which rotary positions need"
            )
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_query_groups: {self.num_query_groups} does not divide num_attention_heads "
                f"({self.num_attention_heads})"
            )


def load_shape(path: str | Path) -> ModelShape:
    """Reads a `ModelShape` from a JSON object whose keys are its fields.

    Raises ValueError, naming file and key, for a file that cannot be read, an unknown or missing key, and for
    values that `ModelShape` refuses.
    """
    values = read_object(path)
    try:
        return ModelShape(**values)
    except (TypeError, ValueError) as error:
        # a TypeError of Python's names the key
        raise ValueError(f"{path}: {error}") from None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, seed: int = 1234, *, pipeline_model_parallel_size: int = 1, **sizes
) -> None:
    """Megatron's process groups and random states. `torch.distributed` has to be initialised before.

    `sizes` are further arguments of Megatron's `parallel_state.initialize_model_parallel`.
    May be called repeatedly. Raises ValueError if Megatron was initialised with another size before.
    """
    expected = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        **sizes,
    }
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**expected)
    for name, size in expected.items():
        # not all arguments are sizes
        ask = getattr(parallel_state, f"get_{name.removesuffix('_size')}_world_size", None)
        if ask is not None and size is not None and (found := ask()) != size:
            raise ValueError(
                f"{name}: expected {size}, but Megatron is already initialised with {found}. Call "
                "parallel_state.destroy_model_parallel() first."
            )
    model_parallel_cuda_manual_seed(seed)


def _settings(shape: ModelShape, bf16: bool) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig for a Llama-like model of `shape` on this rank."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    return dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        layernorm_epsilon=shape.layernorm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # stock layers then save gate and up once, and do not save SiLU's output too
        bias_activation_fusion=True,
        # needs kernels that megatron-core does not contain
        masked_softmax_fusion=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        use_cpu_initialization=True,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )


def build_gpt(
    shape: ModelShape,
    spec: ModuleSpec,
    *,
    seq_length: int,
    vocab_size: int,
    bf16: bool = True,
    seed: int = 1234,
    activations: ActivationsConfig | None = None,
    vp_stage: int | None = None,
    **config,
) -> GPTModel:
    """A megatron-core GPTModel of `shape` whose layers are built from `spec`, on this rank's device.

    Weights are drawn on the CPU, so that a seed produces the same model on every device and under every spec.
    Under pipeline parallelism it is this rank's stage, or its stage `vp_stage` if it has several.
    Weights are BF16, or FP32 if not `bf16`. `activations` is for the COAT layers; None means the file of
    `COAT_CONFIG`, or the defaults. `config` are further fields of Megatron's TransformerConfig; with
    `multi_latent_attention` of its MLATransformerConfig.
    Megatron's process groups have to be initialised before (`initialize_model_parallel`).
    Raises ValueError if the vocabulary does not divide by the tensor-parallel size.
    """
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    if vocab_size % tp_size:
        raise ValueError(
            f"vocab_size: {vocab_size} does not divide by the tensor-parallel size, {tp_size}; pad it"
        )
    dtype = torch.bfloat16 if bf16 else torch.float32
    torch.manual_seed(seed)
    kind = MLATransformerConfig if config.get("multi_latent_attention") else TransformerConfig
    transformer_config = kind(**(_settings(shape, bf16) | config))
    model = GPTModel(
        transformer_config,
        spec,
        vocab_size=vocab_size,
        max_sequence_length=seq_length,
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,
        share_embeddings_and_output_weights=not shape.untie_embeddings_and_output_weights,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    if activations is not None:
        set_activations(model, activations)
    # megatron-core leaves norm weights in FP32 and relies on its training loop to cast them
    return model.to(device=device, dtype=dtype)
