"""The C++ step computes what the reference computes."""

import pytest
import torch

from coat_kernels import adamw
from coat_kernels.adamw import COMPILED, PIECE, compiled_step
from coat_kernels.adamw import cpu as adamw_cpu
from coat_kernels.codecs import get_codec
from tests.kernels.inputs import with_options
from tests.util import rel_rms

adamw_ = with_options(adamw.adamw_)
OPTIONS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def gradient(numel, step):
    generator = torch.Generator().manual_seed(step)
    size, sign = (torch.randn(numel, generator=generator) for _ in range(2))
    g = 1e-3 * torch.exp(3 * size) * sign
    g[::7] = 0
    g[-9:] = 0
    return g


def run(compiled, m_name, v_name, group_size, numel, steps=5, odd=False, **more):
    m_codec, v_codec = get_codec(m_name), get_codec(v_name)
    p = gradient(numel, 99)
    m, v = (codec.zeros(numel, group_size, "cpu") for codec in (m_codec, v_codec))
    for step in range(1, steps + 1):
        g = gradient(numel, step)
        if odd and step == 2:
            g[3], g[200], g[-1] = torch.nan, torch.inf, -torch.inf
        options = {**OPTIONS, **more, "exp_avg_codec": m_codec, "exp_avg_sq_codec": v_codec}
        adamw_([p], [g], [m], [v], [step], group_size=group_size, compiled=compiled, **options)
    return p, m, v


SCALED = {"maximize": True, "grad_scale": torch.tensor([0.25])}
CASES = [(*names, more) for names in COMPILED for more in ({}, SCALED)]
CASES += [("ratio8", "log8", {"dither": True, "beta2": 0.999})]


@pytest.mark.parametrize("group_size", [64, 128, 256])
@pytest.mark.parametrize(("m_name", "v_name", "more"), CASES, ids=str)
def test_compiled_is_the_reference(group_size, m_name, v_name, more):
    assert compiled_step() is not None
    (p, *moments), (q, *others) = (
        run(compiled, m_name, v_name, group_size, 3 * group_size + 17, **more) for compiled in (True, False)
    )
    # each step rounds some ten times by 2^-24; an update is a hundredth of a parameter
    assert rel_rms(p, q) < 5 * 10 * 2**-24
    for (codes, scale, exponent), (codes2, scale2, exponent2) in zip(moments, others, strict=True):
        assert rel_rms(scale, scale2) < 5 * 10 * 2**-24
        # logarithms are right to 2^-22, a sixteenth of an exponent or half a code apart: one in 10^5 may tip
        assert (codes != codes2).sum() <= 1 and torch.equal(exponent, exponent2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_gradients_are_left_to_pytorch(dtype):
    """The compiled step would read them as FP32, beyond their end."""
    names = dict(zip(("exp_avg_codec", "exp_avg_sq_codec"), map(get_codec, COMPILED[0]), strict=True))
    options = adamw.AdamWOptions(**OPTIONS, **names, group_size=128)
    p = torch.ones(300)
    assert adamw_cpu.compiled_can(p, p, options) and not adamw_cpu.compiled_can(p, p.to(dtype), options)


@pytest.mark.parametrize("error", [OSError, RuntimeError, ImportError])
def test_without_a_compiler_steps_run_in_pytorch(error, monkeypatch, caplog):
    def fails(*_, **__):
        raise error("there is no g++\nand no ninja")

    monkeypatch.setattr("torch.utils.cpp_extension.load", fails)
    # the build is attempted once
    assert compiled_step.__wrapped__() is None
    assert caplog.messages == ["AdamW steps on the CPU run in PyTorch, slowly: there is no g++"]


def test_machines_that_share_a_cache_build_for_their_own_cpus(tmp_path, monkeypatch):
    """One file for all cores of a kind, at any clock speed; another file for a CPU with other
    instructions."""
    names = []
    for model, flags, speed in (
        ("A", "avx2 avx512f", 1),
        ("A", "avx2 avx512f", 2),
        ("A", "avx2", 1),
        ("B", "avx2", 1),
    ):
        cores = [
            f"processor\t: {i}\nmodel name\t: {model}\ncpu MHz\t\t: {speed + i}\nflags\t\t: {flags}\n"
            for i in range(2)
        ]
        (tmp_path / "cpuinfo").write_text("\n".join(cores))
        monkeypatch.setattr(adamw_cpu, "CPU_INFO", tmp_path / "cpuinfo")
        names.append(adamw_cpu.build_name())
    assert names[0] == names[1] and len(set(names)) == 3
    monkeypatch.setattr(adamw_cpu, "CPU_INFO", tmp_path / "nothing")
    assert adamw_cpu.build_name().startswith("coat_adamw_cpu_")


@pytest.mark.parametrize("names", [("fp8_expanded", "fp8_expanded"), ("ratio8", "log8")])
def test_what_is_not_finite_stays_where_it_is(names):
    (p, *moments), (q, *others) = (run(compiled, *names, 128, 1000, odd=True) for compiled in (True, False))
    assert torch.equal(p.isnan(), q.isnan()) and p.isnan().sum() == 3
    if names[0] == "ratio8":
        assert all(torch.equal(a.codes, b.codes) for a, b in zip(moments, others, strict=True))
        assert all((a.codes == nan).sum() == 3 for a, nan in zip(moments, (-128, 255), strict=True))
        return
    for a, b in zip(moments, others, strict=True):
        # the sign of a NaN has no meaning
        nan = (b.codes & 0x7F) == 0x7F
        assert torch.equal(torch.where(nan, a.codes & 0x7F, a.codes), torch.where(nan, 0x7F, b.codes))


def test_other_types_and_options_take_the_reference():
    for m_name, v_name, more in (
        ("fp8", "fp8_expanded", {}),
        ("fp8_expanded", "log8", {"dither": True}),
        # dither is not compiled
        ("fp8_expanded", "fp8_expanded", {"dither": True}),
    ):
        (p, *moments), (q, *others) = (
            run(compiled, m_name, v_name, 128, 1000, **more) for compiled in (True, False)
        )
        assert torch.equal(p, q)
        for a, b in zip(moments, others, strict=True):
            assert all(map(torch.equal, a, b))


def test_pieces_are_the_whole():
    """A tensor stepped in several pieces has the noise and the groups of the whole tensor."""
    adamw_reference = with_options(adamw.adamw_reference)
    numel, codec = PIECE + 1000, get_codec("log8")
    m_codec = get_codec("fp8_expanded")
    outcomes = []
    for whole in (True, False):
        p, g = gradient(numel, 1), gradient(numel, 2)
        m, v = (c.zeros(numel, 128, "cpu") for c in (m_codec, codec))
        options = {**OPTIONS, "exp_avg_codec": m_codec, "exp_avg_sq_codec": codec, "group_size": 128}
        if whole:
            adamw_reference(p, g, m, v, 1, dither=True, seed=5, **options)
        else:
            adamw_([p], [g], [m], [v], [1], dither=True, seed=5, **options)
        outcomes.append((p, *m, *v))
    assert all(map(torch.equal, *outcomes))
