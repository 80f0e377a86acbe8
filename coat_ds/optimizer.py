"""AdamW whose moments are stored in FP8 with dynamic range expansion."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch

from coat_ds.config import OPTIMIZER_GROUP_SIZES, CoatConfigError, check_choice, check_type
from coat_ds.state import Moment
from coat_kernels.adamw import adamw_
from coat_kernels.codecs import CODECS, SIGNED_CODECS, Codec, Storage, get_codec

MOMENTS = ("exp_avg", "exp_avg_sq")
PARAM_DTYPES = (torch.float32, torch.bfloat16)
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# the implementation switches of torch.optim.AdamW, which have one implementation here; they stand in the
# parameter groups all the same, so that a state dict has the stock layout
STOCK_SWITCHES: dict[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
# belong to the optimizer and not to a checkpoint: a loaded state dict leaves them as they are
LAYOUT = ("exp_avg_format", "exp_avg_sq_format", "group_size", "min_numel")

METADATA_VERSION = 1
# decoding on another device differs by a few FP32 roundings (2^-24) times at most 16, the largest 1 / k;
# the nearest codes differ by 2^-4 / 16 at least. Anything between the two tells them apart.
SAME_VALUE = 1e-4


class CoatAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` with compressed moments: same arguments, same update, computed in FP32.

    params: parameters or parameter groups; updated in place; FP32 or BF16, any shape and strides.
        Gradients are FP32, BF16 or FP16.
    lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`.
    amsgrad, foreach, capturable, differentiable, fused: only the default values are accepted.
    exp_avg_format, exp_avg_sq_format: storage of the two moments, by name (`coat_kernels.codecs.CODECS`).
    group_size: elements that share one scale and one exponent: 64, 128 or 256.
    min_numel: tensors with fewer elements keep FP32 moments; 0 compresses everything.

    All of them except the implementation switches may differ between parameter groups.
    `state[p]` holds `step` (int) and the `Moment`s `exp_avg` and `exp_avg_sq`. A plain tensor that someone
    puts in a moment's place is encoded by the next step.

    Raises ValueError for values that `torch.optim.AdamW` rejects too, and for an unknown format or size.
    """

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
        group_size: int = 128,
        min_numel: int = 4096,
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
            "group_size": group_size,
            "min_numel": min_numel,
        }
        _check_options(defaults)
        # by name: a subclass for a host may have another optimizer class behind this one
        torch.optim.Optimizer.__init__(self, params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`; the group may set every option of the constructor."""
        if isinstance(param_group, dict):
            _check_options({**self.defaults, **param_group})
        torch.optim.Optimizer.add_param_group(self, param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None):
        """One step; returns the loss of `closure`.

        Raises TypeError or ValueError, before anything is changed, for parameters and gradients of a type,
        shape or device that it cannot handle.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for _, params in work:
            for p in params:
                _check_tensors(p, self.state.get(p, {}))
        for group, params in work:
            buckets: dict[tuple, list[torch.Tensor]] = defaultdict(list)
            for p in params:
                state = self._ready_state(p, group)
                state["step"] += 1
                m, v = (state[name] for name in MOMENTS)
                buckets[p.device, p.dtype, p.grad.dtype, m.codec.name, v.codec.name, m.group_size].append(p)
            for bucket in buckets.values():
                self._update(bucket, group)
        return loss

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in params]
        first = states[0]
        contiguous = [p.contiguous() for p in params]
        adamw_(
            contiguous,
            [p.grad.contiguous() for p in params],
            [s["exp_avg"].storage for s in states],
            [s["exp_avg_sq"].storage for s in states],
            [s["step"] for s in states],
            exp_avg_codec=first["exp_avg"].codec,
            exp_avg_sq_codec=first["exp_avg_sq"].codec,
            group_size=first["exp_avg"].group_size,
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
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

    def _ready_state(self, p: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[p]
        state["step"] = int(state.get("step", 0))
        for name in MOMENTS:
            value = state.get(name)
            if value is None:
                state[name] = Moment.zeros(p.shape, *_storage_of(p, group, name), p.device)
            elif not isinstance(value, Moment):
                state[name] = Moment.encoded(value.to(p.device), *_storage_of(p, group, name))
        return state

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
                for name in MOMENTS:
                    value = entry[name].to(device=p.device, dtype=torch.float32)
                    codec, group_size = _storage_of(p, group, name)
                    state[name] = _restored(value, codec, group_size, stored.get(index, {}).get(name))


def _storage_of(p: torch.Tensor, group: dict[str, Any], name: str) -> tuple[Codec, int]:
    """Codec and group size of a moment of `p`."""
    codec = "fp32" if p.numel() < group["min_numel"] else group[f"{name}_format"]
    return get_codec(codec), group["group_size"]


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
