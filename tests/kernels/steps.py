"""Steps of AdamW by the reference and by the kernel, for states of any format."""

import torch

from coat_kernels import adamw
from coat_kernels.codecs import CODECS, SIGNED_CODECS, get_codec
from coat_kernels.codecs.codec import Encoded
from tests.kernels.inputs import with_options

adamw_, adamw_list, adamw_reference = map(
    with_options, (adamw.adamw_, adamw.step.adamw_triton, adamw.reference.adamw_reference)
)
# every pair of formats that the two moments may have, and the pairs that are defaults
PAIRS = [(m, v) for m in SIGNED_CODECS for v in CODECS if get_codec(m).pairs_with(get_codec(v))]
DEFAULTS = [("fp8_expanded", "fp8_expanded"), ("fp8_expanded", "log8"), ("ratio8", "log8")]
OPTIONS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def adamw_triton(param, grad, exp_avg, exp_avg_sq, step, **options):
    """The kernel for a list of one tensor."""
    adamw_list([param], [grad], [exp_avg], [exp_avg_sq], [step], **options)


def states(m_name, v_name, n, device):
    codecs = {"exp_avg_codec": get_codec(m_name), "exp_avg_sq_codec": get_codec(v_name)}
    return codecs, [codec.zeros(n, device) for codec in codecs.values()]


def values_of(codecs, stored):
    """Both moments as FP32."""
    relative_to = Encoded(codecs["exp_avg_sq_codec"], stored[1])
    return [codec.decode(s, relative_to) for codec, s in zip(codecs.values(), stored, strict=True)]


def run_list(run, params, grads, device, steps=3, **more):
    """Three steps of `adamw_` (the reference on the CPU) or of the kernel; returns the storages of the
    moments."""
    codecs, _ = states("fp8_expanded", "fp8_expanded", 1, device)
    ms, vs = ([codec.zeros(p.numel(), device) for p in params] for codec in codecs.values())
    for step in range(1, steps + 1):
        extra = {k: v(step) if callable(v) else v for k, v in more.items()}
        run(params, grads[step - 1], ms, vs, [step] * len(params), **codecs, **(OPTIONS | extra))
    return [t for s in (*ms, *vs) for t in s]


def gradients(sizes, device, dtype=torch.float32, steps=3):
    return [[torch.randn(n).to(device, dtype) for n in sizes] for _ in range(steps)]
