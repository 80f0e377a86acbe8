"""Packed sequences (THD), documents of `--reset-attention-mask`, windows and sinks in Megatron's layers: what
Megatron's own attention computes for documents one by one, without a mask."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType

from coat_ds.config import ActivationsConfig
from coat_kernels.attention import whole as kernels
from megatron_ext import cpu, options
from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec
from megatron_ext.layers.attention import SDPACoreAttention
from megatron_ext.saved_bytes import saved_bytes
from tests.megatron_ext.attended import S as LENGTH
from tests.megatron_ext.attended import attention, qkv
from tests.megatron_ext.layers import HEADS, D, S, build, rounding_error, whole, without_rounding
from tests.util import rel_rms, run_distributed

pytestmark = pytest.mark.usefixtures("megatron")

LENGTHS = [5, 20, 1, 38]
FORMATS = pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
# FlashAttention computes in BF16 on a GPU; Megatron's attention, of the same numbers, in FP32 everywhere
OURS = torch.bfloat16 if torch.cuda.is_available() else torch.float32
# FP32 as in test_attention.py: sums of S + D terms, three GEMMs, a factor of 4 for cancellation; BF16 as in
# tests/kernels/test_packed.py
BOUND = 2**-6 if OURS == torch.bfloat16 else 4 * 3 * (LENGTH + D) ** 0.5 * 2**-24


def thd(lengths, device, **more) -> PackedSeqParams:
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    given = {"qkv_format": "thd", "cu_seqlens_q": borders, "cu_seqlens_kv": borders}
    given |= {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    return PackedSeqParams(**given | more)


def output_grad(y) -> torch.Tensor:
    """The same numbers in FP32 and BF16."""
    return torch.linspace(-1, 1, y.numel(), device=y.device, dtype=OURS).view_as(y).to(y.dtype)


def no_masks(monkeypatch):
    """Masks of sequence x sequence fail."""

    def made(*_):
        raise AssertionError("a mask was made")

    monkeypatch.setattr(kernels, "_added", made)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("groups", [4, 2])
def test_packed_attention_equals_megatrons_of_each_document(groups, window, device, monkeypatch):
    no_masks(monkeypatch)
    config = {"num_query_groups": groups, "window_size": None if window is None else (window, 0)}
    lengths, results = [7, 1, LENGTH - 8], []
    for packed in (True, False):
        dtype = OURS if packed else torch.float32
        fused, *heads = (t[:, :1] for t in qkv(device, groups, dtype))
        if packed:
            heads = [t.squeeze(1) for t in heads]
            y = attention(**config)(*heads, packed_seq_params=thd(lengths, device)).view(LENGTH, 1, -1)
        else:
            own, parts = (
                attention(DotProductAttention, **config),
                zip(*(t.split(lengths) for t in heads), strict=True),
            )
            masks = [torch.ones(n, n, dtype=torch.bool, device=device).triu(1)[None, None] for n in lengths]
            with cpu.no_cuda():
                y = torch.cat([own(*part, mask) for part, mask in zip(parts, masks, strict=True)])
        results.append((y, *torch.autograd.grad(y, heads, output_grad(y))))
    for ours, theirs in zip(*results, strict=True):
        assert rel_rms(ours.view_as(theirs), theirs) < BOUND


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_softmax_type_equals_megatrons(kind, window, device, monkeypatch):
    config = {"softmax_type": kind, "window_size": None if window is None else (window, 0)}
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)[None, None]
    results = []
    for cls in (SDPACoreAttention, DotProductAttention):
        dtype = OURS if cls is SDPACoreAttention else torch.float32
        fused, q, k, v = qkv(device, 2, dtype)
        with cpu.no_cuda():
            module = attention(cls, num_query_groups=2, use_cpu_initialization=True, **config)
            module.to(device, dtype)
            sinks = [p.data.copy_(torch.tensor([-2.0, 0.0, 1.0, 3.0])) for p in module.parameters()]
            y = module(q, k, v, mask)
        y.backward(output_grad(y))
        results.append((y, fused.grad, *(p.grad for p in module.parameters())))
        assert len(sinks) == len(module.state_dict()) == (kind == "learnable")
    for ours, theirs in zip(*results, strict=True):
        assert rel_rms(ours, theirs) < BOUND


def resetting(monkeypatch):
    """Megatron-LM's arguments with --reset-attention-mask."""
    script = SimpleNamespace(get_args=lambda: SimpleNamespace(reset_attention_mask=True))
    monkeypatch.setattr(options, "megatron_lm", lambda: script)


@pytest.mark.parametrize("options", [{}, {"softmax_type": "off-by-one"}], ids=str)
def test_reset_attention_mask_equals_megatrons(options, device, monkeypatch):
    """The mask of Megatron's data set, for two sequences with other documents."""
    resetting(monkeypatch)
    tokens = torch.ones(2, LENGTH, dtype=torch.int64, device=device)
    tokens[0, 4] = tokens[0, 5] = tokens[1, 11] = 0
    masks = [_get_ltor_masks_and_position_ids(t, 0, True, True, False, True)[0] for t in tokens]
    mask, results = torch.stack(masks), []
    for cls in (SDPACoreAttention, DotProductAttention):
        fused, q, k, v = qkv(device, 2, OURS if cls is SDPACoreAttention else torch.float32)
        with cpu.no_cuda():
            y = attention(cls, num_query_groups=2, **options)(q, k, v, mask)
        y.backward(output_grad(y))
        results.append((y, fused.grad))
    for ours, theirs in zip(*results, strict=True):
        assert rel_rms(ours, theirs) < BOUND
    with pytest.raises(ValueError, match="--reset-attention-mask: expected a mask .* found None"):
        attention()(q, k, v)


def loss_and_grads(model, tokens, params=None):
    model.zero_grad()
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    given = {} if params is None else {"packed_seq_params": params}
    loss = model(tokens, positions, None, labels=tokens, **given).float().sum()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}


def batch(device, lengths=LENGTHS) -> torch.Tensor:
    assert sum(lengths) == S
    return torch.randint(0, 64, (1, S), generator=torch.Generator().manual_seed(5)).to(device)


def one_by_one(model, tokens, lengths=LENGTHS) -> dict:
    found = [loss_and_grads(model, part) for part in tokens.split(lengths, 1)]
    return {name: sum(one[name] for one in found) for name in found[0]}


CONFIGS = {
    "llama": {},
    "qk norms": {"qk_layernorm": True},
    "windows": {"window_size": (4, 0), "window_attn_skip_freq": 2},
    "sinks": {"softmax_type": "learnable", "window_size": (4, 0)},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_sequences_in_sdpa_layers_are_exact(config, device):
    if torch.cuda.is_available():
        pytest.skip("FlashAttention takes no FP32")
    model, tokens = build(sdpa_layer_spec, layers=2, bf16=False, **config), batch(device)
    found, expected = loss_and_grads(model, tokens, thd(LENGTHS, device)), one_by_one(model, tokens)
    for name, value in expected.items():
        # sums of at most 1,000 terms in FP32, in up to 30 operations one after another
        assert rel_rms(found[name], value) < 1000**0.5 * 30 * 2**-24, name


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_sequences_in_coat_layers_against_bf16(config, attention_format, device, monkeypatch):
    no_masks(monkeypatch)
    activations = ActivationsConfig(attention_format=attention_format, cuda_graphs=False)
    ours = build(coat_layer_spec, activations=activations, **config)
    stock, tokens, params = build(sdpa_layer_spec, **config), batch(device), thd(LENGTHS, device)
    found, expected = loss_and_grads(ours, tokens, params), one_by_one(stock, tokens)
    e4m3, e5m2 = (rounding_error(t, device) for t in (torch.float8_e4m3fn, torch.float8_e5m2))
    for name, value in expected.items():
        # test_layer.py: at most 21 roundings to E4M3 and 4 to E5M2 in a layer; the head and the embedding
        # pass them on. Sinks of a few numbers spread more.
        bound = (21 * e4m3**2 + 4 * e5m2**2) ** 0.5
        assert rel_rms(found[name], value) < (4 if value.numel() < 8 else 2) * bound, name


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_sequences_fused_and_not_fused_save_no_mask(config, attention_format, device, monkeypatch):
    no_masks(monkeypatch)
    activations = ActivationsConfig(attention_format=attention_format, cuda_graphs=False)
    model, tokens = build(coat_layer_spec, layers=2, activations=activations, **config), batch(device)
    params = thd(LENGTHS, device)

    def run(given=params):
        return loss_and_grads(model, tokens, given)

    found, kept = run(), saved_bytes(model, run).total
    # equal documents are whole sequences, whose kernel may save other small tensors
    plain = saved_bytes(model, lambda: run(thd([S - 1, 1], device))).total
    # borders, of 4 bytes
    assert abs(kept - plain) <= 4 * len(LENGTHS)
    for layer in model.decoder.layers:
        # a hook inside makes a layer call its modules
        layer.mlp.register_forward_hook(lambda *_: None)
    same = attention_format != "recompute"
    for name, value in run().items():
        # modules save in 8 bits what blocks recompute
        assert found[name].equal(value) if same else rel_rms(found[name], value) < 0.1, name
    if same:
        # Megatron's path keeps its own copy of nothing
        assert saved_bytes(model, run).total == kept


RECOMPUTED = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@pytest.mark.parametrize("config", RECOMPUTED.values(), ids=RECOMPUTED)
def test_packed_sequences_with_recompute(config, device):
    tokens, params = batch(device), thd(LENGTHS, device)
    expected = loss_and_grads(build(coat_layer_spec, softmax_type="learnable"), tokens, params)
    found = loss_and_grads(build(coat_layer_spec, softmax_type="learnable", **config), tokens, params)
    assert all(found[name].equal(value) for name, value in expected.items())


def test_packed_sequences_with_padding(device):
    """cu_seqlens_q_padded: sequences that are padded to a multiple."""
    model, tokens = build(coat_layer_spec), batch(device, [10, 20, 34])
    params = thd([10, 18, 30], device, max_seqlen_q=34, max_seqlen_kv=34)
    params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = thd([10, 20, 34], device).cu_seqlens_q
    with torch.no_grad():
        positions = torch.arange(S, device=device)[None]
        logits = model(tokens, positions, None, packed_seq_params=params)
        tokens[0, 28:30] = tokens[0, 60:] = 1
        again = model(tokens, positions, None, packed_seq_params=params)
    real = [*range(28), *range(30, 60)]
    # the scale of a tensor depends on all its tokens
    assert rel_rms(again[:, real], logits[:, real]) < 0.1
    assert not again[:, 60:].equal(logits[:, 60:])


def test_packed_sequences_that_are_refused(device):
    model, tokens = build(coat_layer_spec), batch(device)
    other = thd([5, 20, 2, 37], device).cu_seqlens_q
    wrong = {
        "cu_seqlens_q that ends at 60": thd([5, 20, 35], device),
        "expected equal cu_seqlens_q and cu_seqlens_kv": thd(LENGTHS, device, cu_seqlens_kv=other),
        "expected qkv_format 'thd' .* found 'sbhd'": thd(LENGTHS, device, qkv_format="sbhd"),
        "expected qkv_format 'thd' .* found 'thd' and None": thd(LENGTHS, device, cu_seqlens_q=None),
        "max_seqlen_q of at least 38": thd(LENGTHS, device, max_seqlen_q=30, max_seqlen_kv=30),
    }
    for text, params in wrong.items():
        with pytest.raises(ValueError, match=text):
            loss_and_grads(model, tokens, params)
    without = ({"attention_dropout": 0.1}, {"attention_backend": AttnBackend.unfused})
    for option in without:
        _, *heads = (t[:, 0] for t in qkv(device, dtype=OURS))
        with pytest.raises(ValueError, match="packed_seq_params runs on FlashAttention"):
            attention(**option)(*heads, packed_seq_params=thd([LENGTH], device))
    _, *heads = (t[:, 0] for t in qkv(device, dtype=OURS))
    attention()(*heads, packed_seq_params=thd([LENGTH], device), attn_mask_type=AttnMaskType.padding_causal)


def run_ranks(config):
    """Compares gradients of whole parameters on 1 and 2 tensor-parallel ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_ext.model import initialize_model_parallel

    cpu.enable()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    found = []
    for ranks in (1, 2):
        initialize_model_parallel(ranks)
        activations = ActivationsConfig(attention_format="sqrt8", cuda_graphs=False)
        model = build(
            coat_layer_spec, 4, bf16=False, activations=activations, sequence_parallel=ranks > 1, **config
        )
        with without_rounding():
            grads = loss_and_grads(model, batch(device), thd(LENGTHS, device))
        parameters = dict(model.named_parameters())
        found.append({n: whole(parameters[n], g) if n in parameters else g for n, g in grads.items()})
        parallel_state.destroy_model_parallel()
    one, two = found
    for name, value in one.items():
        # Megatron's training loop sums the gradients of norms over the ranks
        if "norm" not in name:
            # other orders of sums of at most 1,000 terms in FP32, in up to 30 operations
            assert rel_rms(two[name], value) < 1000**0.5 * 30 * 2**-24, name


def test_packed_sequences_and_sinks_on_tensor_parallel_ranks():
    run_distributed(run_ranks, 2, CONFIGS["sinks"])


def test_sinks_in_sharded_state_dict():
    core = build(coat_layer_spec, softmax_type="learnable").decoder.layers[0].self_attention.core_attention
    held = core.sharded_state_dict("core_attention.", metadata={"dp_cp_group": None})
    (sharded,) = held.values()
    assert sharded.key == "core_attention.softmax_offset" and sharded.global_shape == (HEADS,)
