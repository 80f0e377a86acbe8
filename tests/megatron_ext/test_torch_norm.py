"""The norms of a Megatron without Transformer Engine, with each of the packages named apex."""

import importlib.util
from pathlib import Path

import pytest

from tests.util import run_distributed

# the class that Megatron and this package look for; another project named apex on the package index does not
# have it
NVIDIAS = "class FusedLayerNormAffineFunction: ...\n"


def _package(folder: Path, kind: str) -> Path:
    """The part of NVIDIA's apex that can be imported without a GPU."""
    (folder / "apex" / "normalization").mkdir(parents=True)
    (folder / "apex" / "__init__.py").touch()
    (folder / "apex" / "normalization" / "__init__.py").touch()
    (folder / "apex" / "normalization" / "fused_layer_norm.py").write_text(NVIDIAS)
    if kind == "with kernels":
        (folder / "fused_layer_norm_cuda.py").touch()
    return folder


def _run(folder):
    import sys

    sys.path.insert(0, str(folder))
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from megatron.core.models import backends
    from megatron.core.transformer import transformer_block

    from megatron_ext import cpu
    from megatron_ext.layer_specs import coat_layer_spec
    from megatron_ext.layers import torch_norm
    from megatron_ext.model import ModelShape, build_gpt, initialize_model_parallel

    cpu.enable()
    dist.init_process_group("gloo")
    initialize_model_parallel()
    gpt = {"activation_func": F.gelu, "gated_linear_unit": False, "add_bias_linear": True}
    found = {"megatron": backends.HAVE_APEX, "kernels": torch_norm.apex_has_layer_norm(), "norms": {}}
    # the default of --persist-layer-norm
    for normalization, config in (("RMSNorm", {}), ("LayerNorm", gpt)):
        model = build_gpt(
            ModelShape(1, 32, 48, 4, 2),
            coat_layer_spec,
            seq_length=16,
            vocab_size=64,
            normalization=normalization,
            qk_layernorm=True,
            persist_layer_norm=True,
            **config,
        )
        norms = [model.decoder.final_layernorm, model.decoder.layers[0].self_attention.q_layernorm]
        found["norms"][normalization] = [f"{type(norm).__module__}.{type(norm).__name__}" for norm in norms]
        if not found["kernels"]:
            tokens = torch.zeros(2, 16, dtype=torch.int64)
            model(tokens, torch.arange(16).expand(2, 16), None, labels=tokens).mean().backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
    torch_norm.restore_final_norm()
    found["megatron's"] = transformer_block.LayerNormImpl.__name__
    return found


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("transformer_engine", "fused_layer_norm_cuda")),
    reason="Transformer Engine or apex is here",
)
@pytest.mark.parametrize(
    "kind",
    [
        "without kernels",
        pytest.param("with kernels", marks=pytest.mark.long("a process that imports the frameworks")),
    ],
)
def test_apex_is_told_by_its_contents(tmp_path, kind):
    found = run_distributed(_run, 1, _package(tmp_path, kind), fresh=True)[0]
    # Megatron accepts any package named apex
    assert found["megatron"]
    assert found["megatron's"] == "FusedLayerNorm"
    assert found["kernels"] == (kind == "with kernels")
    torch_norms, megatrons = "torch.nn.modules.normalization", "megatron.core.fusions.fused_layer_norm"
    # Megatron does not have apex's RMSNorm; the norm of heads is ours
    assert found["norms"]["RMSNorm"] == [f"{torch_norms}.RMSNorm", "megatron_ext.layers.norm.CoatHeadNorm"]
    expected = f"{megatrons}.FusedLayerNorm" if kind == "with kernels" else f"{torch_norms}.LayerNorm"
    assert found["norms"]["LayerNorm"] == [expected] * 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"normalization": "L2Norm"}, "--normalization: expected RMSNorm or LayerNorm, found 'L2Norm'"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
    ],
    ids=str,
)
def test_what_torchs_norms_lack_is_named(change, text):
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.layers.torch_norm import LocalNorm

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=text):
        LocalNorm(config, 16)
