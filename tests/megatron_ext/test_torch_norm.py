"""The norms of a Megatron without Transformer Engine."""

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer import TransformerConfig

from megatron_ext import layer_specs  # noqa: F401 (replaces the final norm)
from megatron_ext.layers.torch_norm import OF_BLOCKS, OF_STACKS, LocalNorm, local_norm, replace_final_norm


@pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is here")
def test_final_norm_is_replaced_and_restored():
    for patch in (OF_BLOCKS, OF_STACKS):
        for _ in range(2):
            replace_final_norm(patch)
            assert getattr(patch.owner(), patch.attribute) is LocalNorm
        patch.remove()
        assert getattr(patch.owner(), patch.attribute) is not LocalNorm
        replace_final_norm(patch)
    # Megatron chooses it wherever a package called apex can be imported
    assert local_norm(FusedLayerNorm) is LocalNorm and local_norm(torch.nn.LayerNorm) is torch.nn.LayerNorm


def test_local_norm_refuses_zero_centered_weights():
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    config = TransformerConfig(**sizes, layernorm_zero_centered_gamma=True)
    with pytest.raises(ValueError, match="--apply-layernorm-1p"):
        LocalNorm(config, 16)
