"""Random sequences of operations on an optimizer, with CoatAdamW and with a model of it.

The model is torch.optim.AdamW on FP32 parameters, whose moments are rounded as the format stores them after
each step, and whose parameters are the masters of BF16 parameters. Both have to agree to the bit after every
operation.
"""

import io
import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from coat_ds import CoatAdamW
from coat_ds.optim.options import MOMENTS
from coat_kernels.adamw import join_master
from coat_kernels.codecs import GROUP_SIZE, SIGNED_CODECS, get_codec
from tests.hostile.files import tries

BETAS, EPS = (0.9, 0.95), 1e-8
# moments that are stored independently: with the relative formats, a write into one moment may round the
# other one again (tests/coat_ds/test_pair.py)
FORMATS = [
    (name, v)
    for name, codec in SIGNED_CODECS.items()
    if not codec.relative
    for v in ("fp32", "bf16", "fp8_expanded", "log8")
]
VIEWS = {
    "itself": lambda x: x,
    "rows": lambda x: x[1:],
    "row": lambda x: x[-1],
    "flat": lambda x: x.view(-1)[3:200],
    "last": lambda x: x.view(-1)[-1:],
}
WRITES = {
    "zero": lambda x: x.zero_(),
    "scale": lambda x: x.mul_(0.75),
    "add": lambda x: x.add_(1e-3),
    "fill": lambda x: x.fill_(2.0**-9),
    "mask": lambda x: x.masked_fill_(x > 0, 0),
    "nothing": lambda x: x.mul_(1.0),
    "index": lambda x: x.index_fill_(0, torch.tensor([0]), 1e-4) if x.dim() and len(x) else x.sqrt_(),
}
EDITS = {
    "mask": lambda p: p.mul_(torch.arange(p.numel()).view(p.shape) % 3 > 0),
    "clamp": lambda p: p.clamp_(-0.5, 0.0),
    "zero": lambda p: p.zero_(),
    "copy": lambda p: p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape)),
    "negative zero": lambda p: p.fill_(-0.0),
    "subnormal": lambda p: p.fill_(1e-40),
    "infinite": lambda p: p.view(-1)[::2].fill_(torch.inf) if p.is_contiguous() else p.zero_(),
    "nan": lambda p: p.view(-1)[:1].fill_(torch.nan) if p.is_contiguous() else p.zero_(),
    "largest": lambda p: p.fill_(torch.finfo(p.dtype).max),
    "data": lambda p: p.data.mul_(0.5),
}


def same(a, b):
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


class Run:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.options = dict(lr=1e-2, betas=BETAS, eps=EPS, weight_decay=self.rng.choice([0.0, 0.1]))
        self.storage = dict(min_numel=self.rng.choice([0, 50]))
        self.mode = self.rng.choice(["exact", "nearest"])
        self.formats = self.rng.choice(FORMATS)
        self.params, self.mirrors = [], []
        for _ in range(self.rng.randint(1, 3)):
            self.add(self.rng.choice([(1,), (7,), (129,), (300,), (5, 33), (20, 30)]))
        self.ours, self.stock = self.new(), torch.optim.AdamW(self.mirrors, foreach=False, **self.options)
        self.ours.init_states()

    def add(self, shape):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(self.rng.getrandbits(32)))
        x = x.to(self.rng.choice([torch.float32, torch.bfloat16]))
        transposed = len(shape) == 2 and self.rng.random() < 0.3
        self.params.append(torch.nn.Parameter(x.t().contiguous().t() if transposed else x))
        self.mirrors.append(torch.nn.Parameter(x.float()))

    def new(self, **more):
        exp_avg_format, exp_avg_sq_format = self.formats
        return CoatAdamW(
            self.params,
            **self.options,
            **self.storage,
            exp_avg_format=exp_avg_format,
            exp_avg_sq_format=exp_avg_sq_format,
            bf16_params=self.mode,
            **more,
        )

    def codec(self, p, name):
        kept = p.numel() < self.storage["min_numel"]
        return get_codec("fp32" if kept else self.formats[MOMENTS.index(name)])

    def rounded(self, p, name, x):
        codec = self.codec(p, name)
        return codec.decode(codec.encode(x)).view(x.shape)

    def pairs(self):
        return list(zip(self.params, self.mirrors, strict=True))

    def moment(self, p, mirror, name):
        """The moment of our optimizer, and of the model."""
        state = self.stock.state[mirror]
        if name not in state:
            zeros = {name: torch.zeros(mirror.shape) for name in MOMENTS}
            self.stock.state[mirror] = state = {"step": torch.tensor(0.0), **zeros}
        return self.ours.state[p][name], state[name]

    def master(self, p):
        state = self.ours.state[p]
        return join_master(p.detach(), state["remainder"]) if "remainder" in state else p.detach().float()

    def check(self):
        for p, mirror in self.pairs():
            assert same(self.master(p), mirror.detach()), "parameter"
            for name in MOMENTS:
                mine, model = self.moment(p, mirror, name)
                assert same(mine.decode(), model), name
            assert int(self.ours.state[p]["step"]) == int(self.stock.state[mirror]["step"]), "step"

    def goes_on(self):
        """The model takes over our values, after a conversion that may round."""
        for p, mirror in self.pairs():
            mirror.data.copy_(self.master(p))
            for name in MOMENTS:
                mine, model = self.moment(p, mirror, name)
                model.copy_(mine.decode())

    # operations

    def step(self, kind="normal"):
        generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        kind = self.rng.choice(["normal", "zero", "huge", "tiny", "sparse", "bad", "none"])
        scale = self.rng.choice([None, None, 0.5])
        for p, mirror in self.pairs():
            g = torch.randn(p.shape, generator=generator)
            g = g * {"zero": 0.0, "huge": 1e15, "tiny": 1e-25}.get(kind, 1.0)
            if kind == "sparse":
                g = g * (torch.rand(p.shape, generator=generator) < 0.1)
            if kind == "bad":
                g.view(-1)[self.rng.randrange(g.numel())] = self.rng.choice(
                    [torch.nan, torch.inf, -torch.inf]
                )
            if not p.requires_grad or (kind == "none" and self.rng.random() < 0.5):
                p.grad = mirror.grad = None
                continue
            p.grad = g.to(p.dtype)
            mirror.grad = p.grad.float() * (1.0 if scale is None else scale)
        moved = [(p, mirror) for p, mirror in self.pairs() if p.grad is not None]
        self.ours.step(grad_scale=None if scale is None else torch.tensor(scale))
        self.stock.step()
        for p, mirror in moved:
            if p.dtype == torch.bfloat16:
                if self.mode == "nearest":
                    mirror.data.copy_(p.detach().float() if same(mirror.bfloat16(), p.detach()) else mirror)
                else:
                    # a master above the largest BF16 is infinite
                    mirror.data[mirror.abs() >= 3.3961775e38] *= torch.inf
            for name in MOMENTS:
                _, model = self.moment(p, mirror, name)
                model.copy_(self.rounded(p, name, model))

    def skip(self):
        self.ours.found_inf = torch.tensor(1.0)
        for p in self.params:
            p.grad = torch.randn_like(p) if p.requires_grad else None
        self.ours.step()
        del self.ours.found_inf

    def zero_grad(self):
        self.ours.zero_grad(set_to_none=self.rng.random() < 0.5)
        for p in self.params:
            p.grad = None

    def rate(self):
        lr = self.rng.choice([0.0, 1e-4, 0.03, 1.0])
        self.options["lr"] = self.ours.param_groups[0]["lr"] = self.stock.param_groups[0]["lr"] = lr

    def freeze(self):
        p = self.rng.choice(self.params)
        p.requires_grad_(not p.requires_grad)
        p.grad = None

    def edit_weight(self):
        p, mirror = self.rng.choice(self.pairs())
        edit = EDITS[self.rng.choice(list(EDITS))]
        before = p.detach().clone()
        with torch.no_grad():
            edit(p)
            master = self.master(p)
            seen = p.detach().float()
            # the BF16 value is what can be seen, at most half a step from it
            assert (
                same(master.bfloat16() if p.dtype == torch.bfloat16 else master, p)
                or (
                    ((master - seen).abs() <= seen.abs() * 2.0**-8 + 2.0**-133)
                    | (master == seen)
                    | seen.isnan()
                ).all()
            )
            assert (master.signbit() == seen.signbit())[~seen.isnan()].all()
            unchanged = (before == p) & (before != 0)
            assert same(master[unchanged], mirror[unchanged])
            mirror.copy_(master)

    def edit_state(self):
        p, mirror = self.rng.choice(self.pairs())
        name = self.rng.choice(MOMENTS)
        view, write = (table[self.rng.choice(list(table))] for table in (VIEWS, WRITES))
        mine, model = self.moment(p, mirror, name)
        before = model.clone()
        write(view(mine))
        write(view(model))
        bits = (x.contiguous().view(torch.int32).view(-1) for x in (model, before))
        changed = torch.nn.functional.pad(next(bits) != next(bits), (0, -model.numel() % GROUP_SIZE))
        changed = (
            changed.view(-1, GROUP_SIZE)
            .any(1)
            .repeat_interleave(GROUP_SIZE)[: model.numel()]
            .view(model.shape)
        )
        model.copy_(torch.where(changed, self.rounded(p, name, model), before))

    def put_state(self):
        """A plain tensor that replaces a moment is encoded by the next step."""
        p, mirror = self.rng.choice(self.pairs())
        name = self.rng.choice(MOMENTS)
        x = torch.rand(p.shape, generator=torch.Generator().manual_seed(self.rng.getrandbits(32)))
        _, model = self.moment(p, mirror, name)
        p.requires_grad_(True)
        self.ours.state[p][name] = x
        self.ours.init_states()
        expected = self.rounded(p, name, x)
        torch.testing.assert_close(self.ours.state[p][name].decode(), expected, rtol=2e-4, atol=0)
        model.copy_(self.ours.state[p][name].decode())

    def resume(self, **more):
        """In a new optimizer, through a file."""
        self.ours._checkpoint_layout = self.rng.choice(["stock", "compressed"])
        file = io.BytesIO()
        torch.save(self.ours.state_dict(), file)
        file.seek(0)
        self.ours = self.new(**more)
        self.ours.load_state_dict(torch.load(file, weights_only=False))
        self.ours.init_states()

    def by_torch(self):
        """Through torch.optim.AdamW, which keeps every moment, and back: the same codes."""
        remainders = [self.ours.state[p].get("remainder") for p in self.params]
        self.ours._checkpoint_layout = "stock"
        other = torch.optim.AdamW([torch.nn.Parameter(p.detach().float()) for p in self.params])
        other.load_state_dict(self.ours.state_dict())
        for (p, mirror), q in zip(self.pairs(), other.param_groups[0]["params"], strict=True):
            for name in MOMENTS:
                assert same(other.state[q][name], self.moment(p, mirror, name)[1])
        self.ours = self.new()
        self.ours.load_state_dict(other.state_dict())
        self.ours.init_states()
        for p, remainder in zip(self.params, remainders, strict=True):
            if remainder is not None:
                self.ours.state[p]["remainder"] = remainder

    def reformat(self):
        """Through a file into an optimizer of other formats."""
        old = [[self.moment(p, m, name)[1].clone() for name in MOMENTS] for p, m in self.pairs()]
        self.formats = self.rng.choice(FORMATS)
        self.resume()
        for (p, _), moments in zip(self.pairs(), old, strict=True):
            for name, x in zip(MOMENTS, moments, strict=True):
                # the values themselves if the new codes can represent them
                found, rounded = self.ours.state[p][name].decode(), self.rounded(p, name, x)
                close = (torch.isclose(found, y, rtol=2e-4, atol=0, equal_nan=True) for y in (x, rounded))
                assert (next(close) | next(close)).all()
        self.goes_on()

    def retype(self):
        p, mirror = self.rng.choice(self.pairs())
        p.grad = None
        p.data = p.detach().to(torch.float32 if p.dtype == torch.bfloat16 else torch.bfloat16)
        self.ours.init_states()
        p.requires_grad and mirror.data.copy_(p.detach().float())
        if not p.requires_grad:
            # its state is created when it is trained again
            p.requires_grad_(True)
            self.ours.init_states()
            mirror.data.copy_(p.detach().float())

    def remode(self):
        """From now on BF16 parameters are rounded differently."""
        self.mode = "nearest" if self.mode == "exact" else "exact"
        self.ours.param_groups[0]["bf16_params"] = self.mode
        for p, mirror in self.pairs():
            if p.dtype == torch.bfloat16:
                p.requires_grad_(True)
                mirror.data.copy_(p.detach().float())
        self.ours.init_states()

    def add_group(self):
        if len(self.params) < 5:
            self.add((self.rng.choice([3, 70, 200]),))
            self.ours.param_groups[0]["params"].append(self.params[-1])
            self.stock.param_groups[0]["params"].append(self.mirrors[-1])
            self.ours.init_states()


OPERATIONS = [name for name, value in vars(Run).items() if callable(value) and name[0] != "_"]
OPERATIONS = OPERATIONS[OPERATIONS.index("goes_on") + 1 :]


@tries(0.25)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from([*OPERATIONS, "step", "step"]), min_size=2, max_size=12),
)
def test_any_sequence_is_what_adamw_does(seed, names):
    run = Run(seed)
    for name in names:
        getattr(run, name)()
        run.check()
