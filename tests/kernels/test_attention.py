"""Attention that saves its tensors in 8 bits: results, gradients, bytes, and nesting with other hooks."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from coat_kernels.attention import BACKENDS, additive_mask, causal_attention, custom_attention, switched_on
from coat_kernels.autograd.origin import forget_notes, origin_of
from coat_kernels.fp8 import E4M3
from coat_kernels.linear import fp8_linear
from coat_kernels.tensorwise import tensor_amax
from tests.kernels.agreement import E4M3_RMS, ROUNDING
from tests.util import rel_rms

S, B, HEADS, D = 32, 2, 4, 32


def qkv(device, groups=HEADS, dtype=torch.bfloat16):
    return [torch.randn(S, B, n, D).to(device, dtype).requires_grad_() for n in (HEADS, groups, groups)]


def kept_bytes(run) -> tuple[torch.Tensor, int]:
    storages = {}

    def pack(t):
        # excludes the row sums and seeds of the backend
        if t.dtype in (torch.bfloat16, torch.uint8):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run()
    return y, sum(s.nbytes() for s in storages.values())


@pytest.mark.parametrize("fmt", ROUNDING)
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_attention_is_exact_and_its_gradients_see_one_rounding_of_each_tensor(groups, fmt, device):
    inputs = qkv(device, groups)
    grad = torch.randn(S, B, HEADS * D, device=device, dtype=torch.bfloat16)
    exact = causal_attention(*inputs)
    expected = torch.autograd.grad(exact, inputs, grad)
    y = causal_attention(*inputs, saved_format=fmt)
    assert y.equal(exact)
    # dv: error of the probabilities, from rounded q and k. dq, dk: the errors of the probabilities, of v and
    # the output, and of k or q themselves. A score is a sum of d products over sqrt(d): its error is sqrt(2)
    # roundings of a standard Gaussian, and multiplies every probability; the softmax's gradient is a
    # difference of two such terms.
    score = 2**0.5 * ROUNDING[fmt]
    bounds = (2 * score + 2 * ROUNDING[fmt],) * 2 + (1.5 * score,)
    for a, e, bound in zip(torch.autograd.grad(y, inputs, grad), expected, bounds, strict=True):
        # gradients are also rounded to BF16, by at most 2^-9 of themselves
        assert ROUNDING[fmt] / 4 < rel_rms(a, e) < bound + 2**-9


@pytest.mark.parametrize("groups", [HEADS, 2])
def test_attention_saves_a_byte_and_a_sixteenth_and_shares_the_output(groups, device):
    inputs = qkv(device, groups)
    weight = torch.randn(D, HEADS * D).to(device, torch.bfloat16).requires_grad_()

    def run():
        y = causal_attention(*inputs, saved_format="sqrt8")
        return fp8_linear(y, weight, origin=origin_of(y))

    z, found = kept_bytes(run)
    elements = S * B * D * (2 * HEADS + 2 * groups)
    assert found == elements + elements // 16 + weight.nbytes
    _, plain = kept_bytes(lambda: causal_attention(*inputs))
    assert plain == 2 * elements
    z.sum().backward()
    assert all(t.grad.isfinite().all() for t in (*inputs, weight))


@pytest.mark.parametrize("fmt", [None, "sqrt8"])
def test_attention_origin_gives_the_output_again(fmt, device):
    y = causal_attention(*qkv(device), saved_format=fmt)
    origin = origin_of(y)
    amax = tensor_amax(y)
    _, columns, scale, _ = origin.columns(*origin.tensors, amax, E4M3)
    rounded = (columns.float() * scale).t()[: S * B].view(S, B, -1)
    # one rounding where it is saved and one where it is quantized for the GEMM
    assert rel_rms(rounded, y) < 1.1 * (1 if fmt is None else 2) ** 0.5 * E4M3_RMS


@pytest.mark.parametrize("trained", "qkv")
def test_attention_saves_heads_in_groups_though_one_alone_is_trained(trained, device):
    """As with frozen projections for the other two tensors."""
    inputs = [t.detach().requires_grad_(name == trained) for name, t in zip("qkv", qkv(device), strict=True)]
    heads = [t.permute(1, 2, 0, 3) for t in inputs]
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    elements = 4 * S * B * HEADS * D
    for run in (causal_attention, partial(custom_attention, attend)):
        given = inputs if run is causal_attention else heads
        y, found = kept_bytes(partial(run, *given, saved_format="sqrt8"))
        assert found == elements + elements // 16 and origin_of(y) is not None


def test_attention_saves_nothing_in_evaluation(device):
    with torch.no_grad():
        y = causal_attention(*qkv(device), saved_format="sqrt8")
    assert origin_of(y) is None and y.grad_fn is None


def test_attention_gives_its_groups_to_offloading_hooks(device):
    inputs = qkv(device)
    with torch.autograd.graph.save_on_cpu():
        y = causal_attention(*inputs, saved_format="sqrt8")
    plain = causal_attention(*inputs, saved_format="sqrt8")
    grad = torch.randn_like(y)
    for a, e in zip(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(plain, inputs, grad), strict=True
    ):
        assert a.equal(e)


def test_attention_saves_values_of_fewer_channels_in_groups(device):
    """Uses operations that save each of the tensors on every device instead of attention: torch's fused
    attention on CPUs requires values as wide as queries."""
    q, k, v = (t.transpose(0, 1).detach().requires_grad_() for t in qkv(device))
    v = v[..., : D // 2].detach().requires_grad_()

    def attend(q, k, v):
        return torch.tanh(v * (q * k).sum(-1, keepdim=True))

    heads = [t.transpose(1, 2) for t in (q, k, v)]
    y, found = kept_bytes(lambda: custom_attention(attend, *heads, saved_format="sqrt8"))
    elements = S * B * HEADS * (2 * D + 2 * (D // 2))
    # and the row sums unchanged, in BF16
    assert found == elements + elements // 16 + 2 * S * B * HEADS
    origin = origin_of(y)
    assert sum(t.numel() for t in origin.tensors) == y.numel() + y.numel() // 16
    expected = attend(*heads).transpose(1, 2).flatten(2)
    assert y.equal(expected)
    y.sum().backward()
    assert v.grad.isfinite().all()


def test_attention_saves_other_types_as_they_are(device):
    """Some backends save results that they compute in FP32."""
    heads = [t.permute(1, 2, 0, 3) for t in qkv(device)]

    def attend(q, k, v):
        return q.float().exp().to(q.dtype)

    kept = [custom_attention(attend, *heads, saved_format=fmt) for fmt in (None, "sqrt8")]
    found = [torch.autograd.grad(y.float().square().sum(), heads[0])[0] for y in kept]
    assert found[0].any() and found[0].equal(found[1])


def padded_mask(length, device):
    """Causal mask over two sequences; the second sequence ends with five tokens of padding."""
    mask = torch.ones(length, length, device=device).tril().bool().repeat(B, 1, 1, 1)
    mask[1, ..., -5:] = False
    return mask


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("fmt", [None, "sqrt8"])
def test_attention_saves_repeated_heads_once_and_layers_share_a_mask(device, fmt, dropout):
    groups, length = 2, S - 3
    inputs = [t[:length].detach().clone().requires_grad_() for t in qkv(device, groups)]
    heads = [t.permute(1, 2, 0, 3) for t in inputs]
    mask = padded_mask(length, device)

    def stock():
        q, *repeated = heads[0], *(t.repeat_interleave(HEADS // groups, 1) for t in heads[1:])
        return F.scaled_dot_product_attention(q, *repeated, attn_mask=mask, dropout_p=dropout)

    def attend(*heads):
        added = additive_mask(mask, torch.bfloat16)
        return F.scaled_dot_product_attention(*heads, attn_mask=added, dropout_p=dropout)

    def layers():
        return [custom_attention(attend, *heads, times=HEADS // groups, saved_format=fmt) for _ in "ab"]

    (y, _), found = kept_bytes(layers)
    elements = length * B * D * (2 * HEADS + 2 * groups)
    if not dropout:
        # two outputs; queries, keys and values of both calls, if saved unchanged; and the mask
        kept = elements + length * B * D * HEADS if fmt is None else elements * (1 + 1 / 16)
        assert found == 2 * kept + 2 * B * length * S
    torch.manual_seed(1)
    expected = stock().transpose(1, 2).flatten(2)
    torch.manual_seed(1)
    y = custom_attention(attend, *heads, times=HEADS // groups, saved_format=fmt)
    assert rel_rms(y, expected) < 2**-8
    grad = torch.randn_like(y)
    for a, e in zip(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        # as in the first test, or BF16's own rounding
        assert rel_rms(a, e) < (2**-7 if fmt is None else 2 * (2**0.5 + 1) * ROUNDING["sqrt8"] + 2**-9)


def test_attention_makes_a_mask_once_with_aligned_rows(device):
    mask = padded_mask(S - 3, device)
    added = additive_mask(mask, torch.bfloat16)
    assert additive_mask(mask, torch.bfloat16) is added
    assert additive_mask(mask, torch.float32).dtype == torch.float32
    assert added.stride()[-1] == 1 and not any(stride % 16 for stride in added.stride()[:-1])
    assert added.isfinite().all() and torch.equal(added == 0, mask)
    mask[1, ..., :-5] = True
    again = additive_mask(mask, torch.bfloat16)
    assert again is not added and torch.equal(again == 0, mask)


def test_attention_of_rows_that_see_nothing_is_torchs(device):
    """On CPUs such rows get zeros, and pass no gradient on."""
    heads = [t.permute(1, 2, 0, 3).detach().requires_grad_() for t in qkv(device)]
    mask = padded_mask(S, device)
    mask[1, :, :5] = False
    for _ in range(2):
        assert additive_mask(mask, torch.bfloat16) is mask
    mask[1, :, :5, 0] = True
    assert additive_mask(mask, torch.bfloat16) is not mask
    mask[1, :, :5, 0] = False

    def attend(*heads):
        added = additive_mask(mask, torch.bfloat16)
        return F.scaled_dot_product_attention(*heads, attn_mask=added)

    y = custom_attention(attend, *heads)
    grad = torch.randn_like(y)
    expected = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)
    assert y.equal(expected) and (y.is_cuda or not y[1, :5].any())
    for a, e in zip(
        torch.autograd.grad(y, heads, grad), torch.autograd.grad(expected, heads, grad), strict=True
    ):
        assert a.equal(e)


@pytest.mark.parametrize("groups", [2, HEADS])
@pytest.mark.parametrize("fmt", [None, "sqrt8"])
def test_attention_refuses_a_mask_that_changed_before_backward(device, fmt, groups):
    """The same error as without hooks."""
    heads = [t[:-3].permute(1, 2, 0, 3) for t in qkv(device, groups)]
    added = additive_mask(padded_mask(S - 3, device), torch.bfloat16)
    attend = partial(F.scaled_dot_product_attention, attn_mask=added)
    y = custom_attention(attend, *heads, times=HEADS // groups, saved_format=fmt)
    added.zero_()
    with pytest.raises(RuntimeError, match="modified by an in-?place operation"):
        y.sum().backward()


def test_attention_holds_nothing_that_outer_hooks_took(device):
    held = []

    def pack(t):
        if t.dtype == torch.uint8:
            held.append(weakref.ref(t))
        return t.cpu().clone()

    inputs = qkv(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device)):
        y = causal_attention(*inputs, saved_format="sqrt8")
    forget_notes(y)
    # the codes and exponents of q, k, v and the output
    assert len(held) == 8 and not any(ref() is not None for ref in held)
    y.sum().backward()


@pytest.mark.parametrize("fmt", [None, "sqrt8"])
def test_attention_lets_a_forward_without_backward_go(device, fmt):
    """Attention saves its output, which refers back to its node."""
    inputs = qkv(device, groups=2)
    attend = partial(custom_attention, F.scaled_dot_product_attention, times=HEADS // 2)
    for run, order in ((attend, (1, 2, 0, 3)), (causal_attention, (0, 1, 2, 3))):
        given = [t.permute(order) * 1 for t in inputs]
        held = [StorageWeakRef(t.untyped_storage()) for t in given]
        run(*given, saved_format=fmt)
        del given
        assert all(storage.expired() for storage in held)


def test_attention_with_scale_and_channels_that_are_no_multiple_of_the_group(device):
    q, k, v = (t[..., :20].detach().requires_grad_() for t in qkv(device))
    y = causal_attention(q, k, v, scale=0.3, saved_format="sqrt8")
    heads = [t.permute(1, 2, 0, 3) for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3)
    assert rel_rms(y, expected.permute(2, 0, 1, 3).flatten(2)) < 2**-7
    y.sum().backward()
    assert q.grad.isfinite().all()


def test_attention_leaves_out_what_is_switched_off():
    *rest, last = BACKENDS
    assert switched_on(BACKENDS) == [*rest, last]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert switched_on(BACKENDS) == [b for b in BACKENDS if b != SDPBackend.CUDNN_ATTENTION]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    # in our order of backends, not in theirs
    with sdpa_kernel([last, *rest[1:]]):
        assert switched_on(BACKENDS) == [*rest[1:], last]
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert switched_on((SDPBackend.CUDNN_ATTENTION,)) == []


@pytest.mark.gpu
def test_attention_takes_no_backend_that_is_switched_off():
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    for backend, name in ((SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.MATH, "bmm")):
        with sdpa_kernel(backend), Seen() as seen:
            causal_attention(*qkv("cuda"))
        taken = {name for name in ("cudnn", "flash", "efficient", "bmm") if name in " ".join(seen.names)}
        assert taken == {name}


@pytest.mark.parametrize("fmt", [None, "sqrt8"])
def test_attention_holds_no_repeated_keys_that_outer_hooks_took(device, fmt):
    heads = [t.permute(1, 2, 0, 3).clone() for t in qkv(device, groups=2)]
    held = [StorageWeakRef(t.untyped_storage()) for t in heads]
    attend = F.scaled_dot_product_attention
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu().clone(), lambda t: t.to(device)):
        y = custom_attention(attend, *heads, times=HEADS // 2, saved_format=fmt)
    del heads
    assert all(storage.expired() for storage in held)
    y.sum().backward()
