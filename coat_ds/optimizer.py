"""AdamW whose moments are stored in FP8 with dynamic range expansion."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import chain, repeat
from typing import Any

import torch

from coat_ds.config import (
    BF16_PARAMS,
    KEEP_FP32,
    OPTIMIZER_GROUP_SIZES,
    ROUNDINGS,
    CoatConfigError,
    check_choice,
    check_type,
)
from coat_ds.state import Moment
from coat_kernels.adamw import adamw_
from coat_kernels.codecs import CODECS, SIGNED_CODECS, Codec, Storage, get_codec

MOMENTS = ("exp_avg", "exp_avg_sq")
PARAM_DTYPES = (torch.float32, torch.bfloat16)
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Rule = Sequence[str] | Callable[[str | None, torch.Tensor], bool]

# the implementation switches of torch.optim.AdamW, which have one implementation here; they stand in the
# parameter groups all the same, so that a state dict has the stock layout
STOCK_SWITCHES: dict[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
# belong to the optimizer and not to a checkpoint: a loaded state dict leaves them as they are
LAYOUT = (
    "exp_avg_format",
    "exp_avg_sq_format",
    "exp_avg_sq_rounding",
    "group_size",
    "min_numel",
    "bf16_params",
)

METADATA_VERSION = 1
# decoding on another device differs by a few FP32 roundings (2^-24) times at most 16, the largest 1 / k;
# the nearest codes differ by 2^-4 / 16 at least. Anything between the two tells them apart.
SAME_VALUE = 1e-4


class CoatAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` with compressed moments: same arguments, same update, computed in FP32.

    params: parameters, named parameters or parameter groups; updated in place; FP32 or BF16, any shape and
        strides. Gradients are FP32, BF16 or FP16.
    lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`; an lr on the device is read there.
    capturable: keep `step` on the device, so that a step may be captured in a CUDA graph.
    amsgrad, foreach, differentiable, fused: only the default values are accepted.
    exp_avg_format, exp_avg_sq_format: storage of the two moments, by name (`coat_kernels.codecs.CODECS`).
    exp_avg_sq_rounding: "nearest", "stochastic", or "auto": stochastic for "log8" where 1 - beta2 is below
        1/64, else to nearest. A second moment decays by that part of itself in a step; where it is less than
        half the distance of two codes, rounding to nearest undoes the decay and the moment stays too large.
        The codes of "log8" are close enough for stochastic rounding to cure this without much noise.
    group_size: elements that share one scale and one exponent: 64, 128 or 256.
    min_numel: tensors with fewer elements keep FP32 moments; 0 compresses everything.
    bf16_params: how BF16 parameters are updated. "exact": `state[p]["remainder"]`, int16, makes each one an
        FP32 master, the bits of which are those of an FP32 run. "stochastic": rounded up with the probability
        of what is dropped. "nearest": as `torch.optim.AdamW` does, losing updates below half a BF16 step.
    keep_fp32: which other tensors keep FP32 moments: patterns of names, for parameters given with names, or
        a function of (name or None, parameter).
    seed: of stochastic rounding, which is the same on all ranks and in every run.

    All of them except the implementation switches, keep_fp32 and seed may differ between parameter groups.
    `state[p]` holds `step` (an int; where a gradient scaler or `capturable` needs it, an FP32 tensor on the
    device) and the `Moment`s `exp_avg` and `exp_avg_sq`. A plain tensor that someone puts in a moment's place
    is encoded by the next step. `torch.amp.GradScaler`'s flag of non-finite gradients skips the step on the
    device.

    Raises ValueError for values that `torch.optim.AdamW` rejects too, and for an unknown format or size.
    """

    # GradScaler then leaves scale and flag to `step`, as attributes grad_scale and found_inf
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        exp_avg_format: str = "fp8_expanded",
        exp_avg_sq_format: str = "fp8_expanded",
        exp_avg_sq_rounding: str = "auto",
        group_size: int = 128,
        min_numel: int = 4096,
        bf16_params: str = "exact",
        keep_fp32: Rule = KEEP_FP32,
        seed: int = 0,
    ):
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            **STOCK_SWITCHES,
            "amsgrad": amsgrad,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "exp_avg_format": exp_avg_format,
            "exp_avg_sq_format": exp_avg_sq_format,
            "exp_avg_sq_rounding": exp_avg_sq_rounding,
            "group_size": group_size,
            "min_numel": min_numel,
            "bf16_params": bf16_params,
        }
        _check_options(defaults)
        self._keep_fp32, self._seed = keep_fp32, seed
        self._kept: set[torch.Tensor] = set()
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        # by name: a subclass for a host may have another optimizer class behind this one
        torch.optim.Optimizer.__init__(self, params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_keep_fp32", "_seed", "_kept", "_copies")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`; the group may set every option of the constructor."""
        if isinstance(param_group, dict):
            _check_options({**self.defaults, **param_group})
        torch.optim.Optimizer.add_param_group(self, param_group)
        group = self.param_groups[-1]
        for name, p in zip(group.get("param_names", repeat(None)), group["params"], strict=False):
            if keeps_fp32(self._keep_fp32, name, p):
                self._kept.add(p)

    def copy_weight(self, param: torch.Tensor, copy: torch.Tensor) -> None:
        """From now on every step also writes `param`, which is FP32, to `copy`, rounded to BF16, in one pass.

        Raises ValueError unless `copy` is contiguous BF16 of the same shape on the same device.
        """
        if (copy.dtype, param.dtype) != (torch.bfloat16, torch.float32) or not copy.is_contiguous():
            raise ValueError(
                f"copy_weight: expected a contiguous BF16 copy of an FP32 parameter, found {copy.dtype} of "
                f"{param.dtype}."
            )
        if copy.shape != param.shape or copy.device != param.device:
            raise ValueError(
                f"copy_weight: the copy is {tuple(copy.shape)} on {copy.device}, the parameter "
                f"{tuple(param.shape)} on {param.device}. Give it the parameter's shape and device."
            )
        self._copies[param] = copy

    @torch._disable_dynamo
    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, grad_scale: torch.Tensor | None = None
    ) -> float | None:
        """One step; returns the loss of `closure`.

        grad_scale: FP32 tensor of one element, such as a clip coefficient, by which gradients are multiplied
        while they are read; on the device, and never waited for.

        Raises TypeError or ValueError, before anything is changed, for parameters and gradients of a type,
        shape or device that it cannot handle.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        scaler_scale = getattr(self, "grad_scale", None)
        if scaler_scale is not None:
            inverse = 1 / scaler_scale.float()
            grad_scale = inverse if grad_scale is None else grad_scale * inverse
        work = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for _, params in work:
            for p in params:
                _check_tensors(p, self.state.get(p, {}))
        for group, params in work:
            buckets: dict[tuple, list[torch.Tensor]] = defaultdict(list)
            for p in params:
                state = self._ready_state(p, group, count_on_device=found_inf is not None)
                m, v = (state[name] for name in MOMENTS)
                key = (p.device, p.dtype, p.grad.dtype, m.codec.name, v.codec.name, m.group_size)
                buckets[*key, p in self._copies].append(p)
            for bucket in buckets.values():
                self._update(bucket, group, grad_scale, found_inf)
        return loss

    def _update(
        self,
        params: list[torch.Tensor],
        group: dict[str, Any],
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        states = [self.state[p] for p in params]
        first, device = states[0], params[0].device
        contiguous = [p.contiguous() for p in params]
        has_remainder = "remainder" in first
        rounding, beta2 = group["exp_avg_sq_rounding"], float(group["betas"][1])
        adamw_(
            contiguous,
            [p.grad.contiguous() for p in params],
            [s["exp_avg"].storage for s in states],
            [s["exp_avg_sq"].storage for s in states],
            _count(states, found_inf),
            [s["remainder"] for s in states] if has_remainder else None,
            [self._copies[p] for p in params] if params[0] in self._copies else None,
            exp_avg_codec=first["exp_avg"].codec,
            exp_avg_sq_codec=first["exp_avg_sq"].codec,
            group_size=first["exp_avg"].group_size,
            # a rate on another device would be waited for on every step
            lr=group["lr"] if _is_on(group["lr"], device) else float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            grad_scale=None if grad_scale is None else grad_scale.to(device),
            found_inf=None if found_inf is None else found_inf.to(device),
            stochastic=params[0].dtype == torch.bfloat16 and group["bf16_params"] == "stochastic",
            dither=rounding == "stochastic"
            or (rounding == "auto" and first["exp_avg_sq"].codec.fine and 1 - beta2 < 1 / 64),
            seed=self._seed,
        )
        for p, updated in zip(params, contiguous, strict=True):
            if updated is not p:
                p.copy_(updated)
        # a kernel writes behind autograd's back: a graph that saved the old values has to notice
        torch.autograd.graph.increment_version(params)

    def init_states(self) -> None:
        """Creates what is missing of the states of all parameters, and encodes plain tensors among them."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._ready_state(p, group)

    def _ready_state(
        self, p: torch.Tensor, group: dict[str, Any], count_on_device: bool = False
    ) -> dict[str, Any]:
        state = self.state[p]
        step = state.get("step", 0)
        if group["capturable"] or count_on_device:
            if not _is_on(step, p.device):
                state["step"] = torch.tensor(float(step), dtype=torch.float32, device=p.device)
        else:
            state["step"] = int(step)
        for name in MOMENTS:
            value = state.get(name)
            if value is None:
                state[name] = Moment.zeros(p.shape, *self._storage_of(p, group, name), p.device)
            elif not isinstance(value, Moment):
                state[name] = Moment.encoded(value.to(p.device), *self._storage_of(p, group, name))
        if p.dtype == torch.bfloat16 and group["bf16_params"] == "exact" and "remainder" not in state:
            # zero: what the parameter holds is taken to be the master
            state["remainder"] = torch.zeros(p.shape, dtype=torch.int16, device=p.device)
        return state

    def _storage_of(self, p: torch.Tensor, group: dict[str, Any], name: str) -> tuple[Codec, int]:
        """Codec and group size of a moment of `p`."""
        small = p.numel() < group["min_numel"] or p in self._kept
        return get_codec("fp32" if small else group[f"{name}_format"]), group["group_size"]

    def layout(self) -> str:
        """A table of how the moments of each tensor are stored, with their bytes; equal rows are counted."""
        return layout_table(
            (
                name,
                p.shape,
                *(self._storage_of(p, group, moment)[0] for moment in MOMENTS),
                group["group_size"],
            )
            for group in self.param_groups
            for name, p in zip(group.get("param_names", repeat("")), group["params"], strict=False)
        )

    def moments(self, param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments of `param` as plain FP32 tensors of its shape; zeros before the first step.

        Raises ValueError for a tensor that this optimizer does not hold.
        """
        if not any(param is p for group in self.param_groups for p in group["params"]):
            raise ValueError(
                f"moments: a tensor of shape {tuple(param.shape)} is none of this optimizer's parameters. "
                "ZeRO's are flat partitions: use deepspeed.utils.safe_get_full_optimizer_state(param, name)."
            )
        exp_avg, exp_avg_sq = (self.state.get(param, {}).get(name) for name in MOMENTS)
        return _as_plain(exp_avg, param), _as_plain(exp_avg_sq, param)

    def state_dict(self) -> dict[str, Any]:
        """The layout of `torch.optim.AdamW`, with FP32 moments on the CPU, and how they were stored.

        The latter, under `"coat"`, lets `load_state_dict` restore the very same codes. One tensor is
        decoded at a time.
        """
        packed = super().state_dict()
        state, stored = {}, {}
        for index, entry in packed["state"].items():
            state[index] = plain = dict(entry)
            stored[index] = {}
            for name, value in entry.items():
                if isinstance(value, Moment):
                    plain[name] = value.decode().cpu()
                    stored[index][name] = {
                        "codec": value.codec.name,
                        "group_size": value.group_size,
                        "scale": value.storage.scale.cpu(),
                        "exponent": value.storage.exponent.cpu(),
                    }
                elif name == "step":
                    plain[name] = torch.tensor(float(value), dtype=torch.float32)
        return {**packed, "state": state, "coat": {"version": METADATA_VERSION, "moments": stored}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this class's state dict, with the same codes if the values are the saved ones, or
        `torch.optim.AdamW`'s, whose moments are encoded.

        The formats, group size and `min_numel` of this optimizer stay as they are.
        Raises ValueError if the state dict does not fit the parameters.
        """
        kept = [{k: group[k] for k in (*LAYOUT, *STOCK_SWITCHES)} for group in self.param_groups]
        loaded = {}

        # torch would cast the moments to the parameters' type and hold all of them in FP32 at once:
        # it gets the parameter groups, with every hook in its place, and the states are loaded here
        def take_states(_, incoming):
            _check_states(incoming, self.param_groups)
            loaded.update(incoming)
            return {**incoming, "state": {}}

        def load_states(_):
            for group, own in zip(self.param_groups, kept, strict=True):
                group.update(own)
            self._load_states(loaded)

        hooks = (
            self.register_load_state_dict_pre_hook(take_states),
            self.register_load_state_dict_post_hook(load_states, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _load_states(self, loaded: dict[str, Any]) -> None:
        coat = loaded.get("coat", {})
        stored = coat.get("moments", {}) if coat.get("version") == METADATA_VERSION else {}
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                entry = loaded["state"].get(index)
                if not entry:
                    continue
                self.state[p] = state = {**entry, "step": int(entry["step"])}
                if "remainder" in entry:
                    state["remainder"] = entry["remainder"].to(p.device, copy=True)
                for name in MOMENTS:
                    value = entry[name].to(device=p.device, dtype=torch.float32)
                    codec, group_size = self._storage_of(p, group, name)
                    state[name] = _restored(value, codec, group_size, stored.get(index, {}).get(name))


def layout_table(tensors: Iterable[tuple[str, Sequence[int], Codec, Codec, int]]) -> str:
    """A text table of (name, shape, codec of exp_avg, codec of exp_avg_sq, group size); equal rows, up to the
    numbers in the name, are counted.
    """
    rows: dict[tuple, list[int]] = {}
    for name, shape, *codecs, group_size in tensors:
        numel = torch.Size(shape).numel()
        size = sum(codec.zeros(numel, group_size, "meta").nbytes for codec in codecs)
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        row = rows.setdefault((kind, tuple(shape), *(codec.name for codec in codecs)), [0, 0])
        row[0], row[1] = row[0] + 1, row[1] + size
    lines = [f"{'tensors':>7}  {'bytes':>15}  {'exp_avg':<18} {'exp_avg_sq':<18} shape, name"]
    for (kind, shape, m, v), (count, size) in rows.items():
        lines.append(f"{count:>7}  {size:>15,}  {m:<18} {v:<18} {list(shape)} {kind}".rstrip())
    return "\n".join(lines)


def keeps_fp32(rule: Rule, name: str | None, p: torch.Tensor) -> bool:
    """Whether `rule`, patterns of names or a function of name and parameter, keeps FP32 moments for `p`."""
    if callable(rule):
        return bool(rule(name, p))
    return name is not None and any(fnmatchcase(name.lower(), pattern.lower()) for pattern in rule)


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


def _count(states: list[dict[str, Any]], found_inf: torch.Tensor | None) -> list[int] | torch.Tensor:
    """Advances every `step`, unless the flag says that this one is skipped, and returns them."""
    if not isinstance(states[0]["step"], torch.Tensor):
        for state in states:
            state["step"] += 1
        return [state["step"] for state in states]
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1.0)
    counts = torch.stack(steps)
    if found_inf is not None:
        skipped = (found_inf.to(counts.device) != 0).float().reshape(())
        torch._foreach_sub_(steps, skipped)
    return counts


def _as_plain(value: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor:
    if value is None:
        return torch.zeros(p.shape, device=p.device)
    return value.decode() if isinstance(value, Moment) else value.float()


def _restored(value: torch.Tensor, codec: Codec, group_size: int, stored: dict[str, Any] | None) -> Moment:
    """`value` with the scales and exponents that it was saved with, if they are still its own."""
    if stored is not None and (stored["codec"], stored["group_size"]) == (codec.name, group_size):
        blank = codec.zeros(value.numel(), group_size, "meta")
        if (stored["scale"].shape, stored["exponent"].shape) == (blank.scale.shape, blank.exponent.shape):
            like = Storage(blank.codes, *(stored[k].to(value.device) for k in ("scale", "exponent")))
            moment = Moment.encoded(value, codec, group_size, like)
            if torch.allclose(moment.decode(), value, rtol=SAME_VALUE, atol=0, equal_nan=True):
                return moment
    return Moment.encoded(value, codec, group_size)


def _check_options(options: dict[str, Any]) -> None:
    """Raises ValueError for options that `CoatAdamW` cannot honour."""
    for name, only in STOCK_SWITCHES.items():
        value = options[name]
        # foreach=False and fused=False ask for the plain loop, which is what any of them means here
        if value != only and not (only is None and value is False):
            raise ValueError(f"CoatAdamW: {name}={value!r} is not supported. Leave it at {only!r}.")
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"CoatAdamW: a tensor lr must have 1 element, found shape {tuple(lr.shape)}.")
    for name in ("lr", "eps", "weight_decay"):
        if not options[name] >= 0:
            raise ValueError(f"CoatAdamW: {name} must be 0 or more, found {options[name]!r}.")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"CoatAdamW: betas must be two numbers in [0, 1), found {betas!r}.")
    check_choice("CoatAdamW: exp_avg_sq_format", options["exp_avg_sq_format"], tuple(CODECS))
    # a format without signs would lose half of the first moment
    check_choice("CoatAdamW: exp_avg_format", options["exp_avg_format"], tuple(SIGNED_CODECS))
    check_choice("CoatAdamW: group_size", options["group_size"], OPTIMIZER_GROUP_SIZES)
    check_choice("CoatAdamW: bf16_params", options["bf16_params"], BF16_PARAMS)
    check_choice("CoatAdamW: exp_avg_sq_rounding", options["exp_avg_sq_rounding"], ROUNDINGS)
    check_type("CoatAdamW: min_numel", options["min_numel"], int)
    if options["min_numel"] < 0:
        raise CoatConfigError(f"CoatAdamW: min_numel must be 0 or more, found {options['min_numel']}.")


def _check_tensors(p: torch.Tensor, state: dict[str, Any]) -> None:
    """Raises TypeError or ValueError for a parameter, gradient or state that the step cannot handle."""
    grad = p.grad
    what = f"CoatAdamW: a parameter of shape {tuple(p.shape)} on {p.device}"
    if grad.layout is not torch.strided or p.layout is not torch.strided:
        raise TypeError(
            f"{what} has a gradient of layout {grad.layout}. Use a dense gradient, as with "
            "torch.nn.Embedding(sparse=False)."
        )
    if p.dtype not in PARAM_DTYPES:
        raise TypeError(
            f"{what} is {p.dtype}; expected FP32 or BF16. Give the optimizer FP32 master weights."
        )
    if grad.dtype not in GRAD_DTYPES:
        raise TypeError(f"{what} has a {grad.dtype} gradient; expected FP32, BF16 or FP16. Cast it first.")
    if grad.shape != p.shape or grad.device != p.device:
        raise ValueError(
            f"{what} has a gradient of shape {tuple(grad.shape)} on {grad.device}. Give it the parameter's "
            "shape and device."
        )
    for name in MOMENTS:
        moment = state.get(name)
        if moment is not None and moment.shape != p.shape:
            raise ValueError(
                f"{what} has {name} of shape {tuple(moment.shape)}. Give it the parameter's shape."
            )
        if isinstance(moment, Moment) and moment.device != p.device:
            raise ValueError(
                f"{what} has {name} on {moment.device}. Move the model before the first step, or load the "
                "optimizer's state dict again."
            )


def _check_states(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raises ValueError for a state that does not fit its parameter, before anything is changed."""
    saved = state_dict["param_groups"]
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        return  # torch's own message is the one that users know
    indices = chain.from_iterable(g["params"] for g in saved)
    params = chain.from_iterable(g["params"] for g in groups)
    for index, p in zip(indices, params, strict=True):
        entry = state_dict["state"].get(index)
        if not entry:
            continue
        if "max_exp_avg_sq" in entry:
            raise ValueError("load_state_dict: the state is amsgrad's, which CoatAdamW does not support.")
        missing = [k for k in ("step", *MOMENTS) if k not in entry]
        if missing:
            raise ValueError(
                f"load_state_dict: the state of parameter {index} has no {', '.join(missing)}, but "
                f"{', '.join(entry)}. Load the state dict of CoatAdamW or torch.optim.AdamW."
            )
        for name in MOMENTS:
            if entry[name].shape != p.shape:
                raise ValueError(
                    f"load_state_dict: {name} of parameter {index} is {tuple(entry[name].shape)}, the "
                    f"parameter {tuple(p.shape)}. Load a checkpoint of the same model and the same layout."
                )
