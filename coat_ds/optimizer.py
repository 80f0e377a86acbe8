"""AdamW whose moments are stored in eight bits each."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import repeat
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coat_ds.config import (
    BF16_PARAMS,
    CHECKPOINT_LAYOUTS,
    EXP_AVG_FORMATS,
    KEEP_FP32,
    OPTIMIZER_GROUP_SIZES,
    ROUNDINGS,
    CoatConfigError,
    check_choice,
    check_pair,
    check_type,
)
from coat_ds.narrow_grad import narrow_and_scale
from coat_ds.shards import is_distributed, laid_out_like, local, shard_of
from coat_ds.state import Layout, Moment, Piece, paired
from coat_ds.state_dict import (
    check_groups,
    check_layout,
    check_states,
    is_remainder,
    restored,
    steps_of,
    take_states,
)
from coat_kernels.adamw import AdamWOptions, adamw_
from coat_kernels.codecs import CODECS, Codec, first_codec, get_codec

MOMENTS = ("exp_avg", "exp_avg_sq")
PARAM_DTYPES = (torch.float32, torch.bfloat16)
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Rule = Sequence[str] | Callable[[str | None, torch.Tensor], bool]

# the implementation switches of torch.optim.AdamW and DeepSpeed's, which have one implementation here; they
# stand in the parameter groups all the same, so that a state dict is one for each of those
STOCK_SWITCHES: dict[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
    "bias_correction": True,
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


class Fragment(NamedTuple):
    """What a flat partition holds of one of the model's parameters."""

    start: int
    """Its first element in the partition."""
    numel: int
    offset: int
    """Its first element in the parameter."""
    kept: bool
    """Whether the parameter keeps FP32 moments."""


class CoatAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` with compressed moments: same arguments, same update, computed in FP32.

    params: parameters, named parameters or parameter groups; updated in place; FP32 or BF16, any shape and
        strides. Gradients are FP32, BF16 or FP16.
    lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`; an lr on the device is read there.
    capturable: keep `step` on the device, so that a step may be captured in a CUDA graph.
    amsgrad, foreach, differentiable, fused: only the default values are accepted.
    exp_avg_format, exp_avg_sq_format: storage of the two moments, by name (`coat_kernels.codecs.CODECS`).
        "auto" is "ratio8" beside "log8", else "fp8_expanded". The paper's format is "fp8_expanded" for both.
    exp_avg_sq_rounding: "nearest", "stochastic", or "auto": stochastic for "log8" where 1 - beta2 is below
        1/64, else to nearest. A second moment decays by that part of itself in a step; where it is less than
        half the distance of two codes, rounding to nearest undoes the decay and the moment stays too large.
        The codes of "log8" are close enough for stochastic rounding to cure this without much noise. What is
        added before rounding is not random but goes through the interval with the steps, the same wherever
        tensors are cut.
    group_size: elements that share one scale and one exponent: 64, 128 or 256.
    min_numel: tensors with fewer elements keep FP32 moments; 0 compresses everything.
    bf16_params: how BF16 parameters are updated. "exact": `state[p]["remainder"]`, int16, makes each one an
        FP32 master, the bits of which are those of an FP32 run. "stochastic": rounded up with the probability
        of what is dropped. "nearest": as `torch.optim.AdamW` does, losing updates below half a BF16 step.
        Weights may be edited between steps. "exact" then goes on from what they show, but for at most half a
        BF16 step that the remainder adds, since masks and clamps, which write all weights and change few,
        must not cost the others theirs; zeros and what is not finite count exactly. After weights were
        replaced as a whole, `state[p]["remainder"].zero_()` makes that exact too.
    keep_fp32: which other tensors keep FP32 moments: patterns of names, for parameters given with names, or
        a function of (name or None, parameter).
    seed: of stochastic rounding of BF16 parameters, which is the same on all ranks and in every run.
    compiled: steps on the CPU run in C++, compiled when it is first needed: many times as fast as the PyTorch
        that they run in otherwise, and equal but for FP32 rounding.
    checkpoint_layout: what `state_dict` holds. "stock": FP32 moments, as `torch.optim.AdamW`'s does.
        "compressed": what is stored, 2.1 bytes a parameter instead of 8, which is read where `coat_ds` is.

    All of them except the implementation switches, keep_fp32, seed, checkpoint_layout and compiled may differ
    between parameter groups.
    Parameters may be DTensors (FSDP2's `fully_shard`, HSDP, tensor parallelism): each rank steps its shard.
    Moments are DTensors laid out like the parameter then, and so they are in `state_dict`, in FP32, which
    `torch.distributed.checkpoint` reads and writes at any number of ranks. `min_numel` and `keep_fp32` are
    about the whole parameter. Groups are counted from the start of each shard: the codes are the same at any
    number of ranks if shards are whole groups, as where dimension 0 is cut and its rows have a multiple of
    `group_size` elements. Of others a group that is cut elsewhere is encoded once more when it is loaded, and
    its moments then differ by the format's rounding.
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
        exp_avg_format: str = "auto",
        exp_avg_sq_format: str = "log8",
        exp_avg_sq_rounding: str = "auto",
        group_size: int = 128,
        min_numel: int = 4096,
        bf16_params: str = "exact",
        keep_fp32: Rule = KEEP_FP32,
        seed: int = 0,
        checkpoint_layout: str = "stock",
        compiled: bool = False,
    ):
        defaults = {
            "lr": lr,
            "betas": tuple(betas) if isinstance(betas, list) else betas,
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
        check_choice("CoatAdamW: checkpoint_layout", checkpoint_layout, CHECKPOINT_LAYOUTS)
        self._keep_fp32, self._seed, self._checkpoint_layout = keep_fp32, seed, checkpoint_layout
        self._compiled = compiled
        self._fragments: dict[torch.Tensor, tuple[Fragment, ...]] = {}
        self._arrived: Counter[str] = Counter()
        self._group_index: dict[torch.Tensor, int] = {}
        self._kept: set[torch.Tensor] = set()
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        # by name: a subclass for a host may have another optimizer class behind this one
        torch.optim.Optimizer.__init__(self, params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_keep_fp32", "_seed", "_checkpoint_layout", "_compiled", "_fragments", "_group_index")
        own += ("_arrived", "_kept", "_copies")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`; the group may set every option of the constructor."""
        if isinstance(param_group, dict):
            _check_names(param_group, self.defaults)
            _check_options({**self.defaults, **param_group})
        torch.optim.Optimizer.add_param_group(self, param_group)
        group = self.param_groups[-1]
        if self._checkpoint_layout == "compressed" and any(map(is_distributed, group["params"])):
            raise ValueError(
                "CoatAdamW: checkpoint_layout='compressed' cannot be cut for another number of ranks, as "
                "checkpoints of DTensors are. Take 'stock'."
            )
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
        held, copied = local(param), local(copy)
        if copied.shape != held.shape or copied.device != held.device:
            raise ValueError(
                f"copy_weight: the copy is {tuple(copied.shape)} on {copied.device}, the parameter "
                f"{tuple(held.shape)} on {held.device}. Give it the parameter's shape and device."
            )
        self._copies[param] = copied

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
        if is_distributed(grad_scale):
            # a norm of sharded gradients is summed over ranks here
            grad_scale = grad_scale.full_tensor()
        if scaler_scale is not None:
            inverse = 1 / scaler_scale.float()
            grad_scale = inverse if grad_scale is None else grad_scale * inverse
        work = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for _, params in work:
            for p in params:
                _check_tensors(p, self.state.get(p, {}))
        for group, params in work:
            self._update(group, params, grad_scale, found_inf)
        return loss

    def _update(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        states = [self._ready_state(p, group, count_on_device=found_inf is not None) for p in params]
        held = [local(p) for p in params]
        contiguous = [shard.contiguous() for shard in held]
        read = [narrow_and_scale(shard_of(p.grad, p)) for p in params]
        grads, scales = [grad.contiguous() for grad, _ in read], [scale for _, scale in read]
        steps = _count(states, found_inf)
        # each piece of the moments is a tensor to the kernel
        buckets: dict[tuple, list[tuple[int, Piece, Piece]]] = defaultdict(list)
        for i, (p, grad, state) in enumerate(zip(params, grads, states, strict=True)):
            if not grad.numel():
                # a rank may hold nothing of a DTensor
                continue
            m, v = (local(state[name]) for name in MOMENTS)
            options = m.group_size, "remainder" in state, p in self._copies
            key = (p.device, p.dtype, grad.dtype, id(scales[i]), *options)
            for pieces in zip(m.pieces, v.pieces, strict=True):
                buckets[*key, *(piece.codec.name for piece in pieces)].append((i, *pieces))
        for (device, dtype, _, _, group_size, has_remainder, has_copy, *_), bucket in buckets.items():
            scale = _product(grad_scale, scales[bucket[0][0]])
            m_codec, v_codec = (piece.codec for piece in bucket[0][1:])
            adamw_(
                [_cut(contiguous[i], piece) for i, piece, _ in bucket],
                [_cut(grads[i], piece) for i, piece, _ in bucket],
                [piece.storage for _, piece, _ in bucket],
                [piece.storage for _, _, piece in bucket],
                _gather([steps[i] for i, *_ in bucket]),
                AdamWOptions(
                    exp_avg_codec=m_codec,
                    exp_avg_sq_codec=v_codec,
                    group_size=group_size,
                    # a rate on another device would be waited for on every step
                    lr=group["lr"] if _is_on(group["lr"], device) else float(group["lr"]),
                    beta1=float(group["betas"][0]),
                    beta2=float(group["betas"][1]),
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    maximize=group["maximize"],
                    stochastic=dtype == torch.bfloat16 and group["bf16_params"] == "stochastic",
                    dither=rounds_stochastically(group, v_codec),
                    seed=self._seed,
                ),
                [_cut(local(states[i]["remainder"]), piece) for i, piece, _ in bucket]
                if has_remainder
                else None,
                [_cut(self._copies[params[i]], piece) for i, piece, _ in bucket] if has_copy else None,
                grad_scale=None if scale is None else scale.to(device),
                found_inf=None if found_inf is None else found_inf.to(device),
                compiled=self._compiled,
            )
        for shard, updated in zip(held, contiguous, strict=True):
            if updated is not shard:
                shard.copy_(updated)
        # a kernel writes behind autograd's back: a graph that saved the old values has to notice
        torch.autograd.graph.increment_version(
            [*params, *(x for x, p in zip(held, params, strict=True) if x is not p)]
        )

    def set_fragments(self, param: torch.Tensor, fragments: Iterable[Fragment], group_index: int) -> None:
        """Says of which parameters `param`, a flat partition of the kind that ZeRO makes, is composed, and
        creates its states.

        Groups of its moments are counted from the first element of each parameter, wherever the partition
        starts and whatever precedes the parameter in it: after the same gradients the codes and metadata of a
        group are the same bits at any number of ranks. Of a group that a border between two ranks cuts, each
        rank holds a part, which is a group of its own there. Moments that exist are encoded again, if
        their groups change.

        fragments: what `param` holds, ascending by start; elements between and after them are padding.
        group_index: the parameter group; ZeRO-3 puts `param` into it during a step only.
        """
        self._fragments[param] = tuple(fragments)
        self._group_index[param] = group_index
        group = self.param_groups[group_index]
        state = self._ready_state(param, group)
        second = None
        # the second first: the first may be relative to it
        for name in reversed(MOMENTS):
            layout = self._layout_of(param, group, name)
            if state[name].arrangement != layout:
                state[name] = state[name].rearranged(layout, second=second)
            second = state[name]
        self._pair(param)

    def init_states(self) -> None:
        """Creates what is missing of the states of all parameters, and encodes plain tensors among them."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._ready_state(p, group)
        for p, group_index in self._group_index.items():
            self._ready_state(p, self.param_groups[group_index])

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
        # the second first: the first may be relative to it
        for name in reversed(MOMENTS):
            value = state.get(name)
            if value is None:
                layout = self._layout_of(p, group, name)
                moment = Moment.zeros(local(p).shape, layout, group["group_size"], p.device)
                state[name] = laid_out_like(p, moment)
            elif not isinstance(local(value), Moment) or is_distributed(value) != is_distributed(p):
                # a universal checkpoint's values arrive like this
                self._take_moment(p, group, name, value)
        self._pair(p)
        if not _has_remainder(p, group):
            # the parameter was of another type, or is rounded otherwise from now on
            state.pop("remainder", None)
        elif "remainder" not in state:
            # zero: what the parameter holds is taken to be the master
            remainder = torch.zeros(local(p).shape, dtype=torch.int16, device=p.device)
            state["remainder"] = laid_out_like(p, remainder)
        return state

    def _take_moment(self, p: torch.Tensor, group: dict[str, Any], name: str, values: torch.Tensor) -> None:
        """Puts FP32 values into the state, in the codes that they were decoded from if they were."""
        values, layout = shard_of(values, p).to(p.device), self._layout_of(p, group, name)
        second = local(self.state[p]["exp_avg_sq"]) if name == "exp_avg" else None
        moment, exact = Moment.recovered(values, layout, group["group_size"], second)
        self.state[p][name] = laid_out_like(p, moment)
        self._count_arrival(exact)

    def _pair(self, p: torch.Tensor) -> None:
        """Has the moments of `p` know one another, if the first is relative to the second."""
        state = self.state[p]
        held = tuple(local(state[name]) for name in MOMENTS)
        if held[0].pair is None and held[1].pair is None and not held[0].is_relative:
            return
        for name, old, new in zip(MOMENTS, held, paired(*held), strict=True):
            if new is not old:
                state[name] = laid_out_like(p, new)

    def _count_arrival(self, exact: bool) -> None:
        self._arrived["restored to the bit" if exact else "with groups encoded from FP32"] += 1

    def keeps(self, p: torch.Tensor, group: dict[str, Any], numel: int | None = None) -> bool:
        """Whether `p`, of `numel` elements if they are elsewhere now, keeps FP32 moments in `group`."""
        return (p.numel() if numel is None else numel) < group["min_numel"] or p in self._kept

    def _layout_of(self, p: torch.Tensor, group: dict[str, Any], name: str) -> Layout:
        """First element and codec of each piece of a moment of `p`."""
        codec, kept = codec_of(group, name), get_codec("fp32")
        if p not in self._fragments:
            return ((0, kept if self.keeps(p, group) else codec),)
        begins = piece_begins(self._fragments[p], p.numel(), group["group_size"])
        return tuple((begin, kept if is_kept else codec) for begin, is_kept in begins)

    def layout(self) -> str:
        """A table of how the moments of each tensor are stored, with their bytes, of a DTensor those of all
        shards; equal rows are counted.
        """
        return layout_table(
            (name, p.shape, *(codec for _, codec in codecs), group["group_size"])
            for group in self.param_groups
            for name, p in zip(group.get("param_names", repeat("")), group["params"], strict=False)
            for codecs in zip(*(self._layout_of(p, group, moment) for moment in MOMENTS), strict=True)
        )

    def moments(self, param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments of `param` as plain FP32 tensors of its shape, DTensors if it is one; zeros before the
        first step.

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
        decoded at a time. With the compressed `checkpoint_layout` moments are given as they are stored.
        Moments of DTensors are FP32 DTensors on the parameter's device, for as long as the dict is held.
        """
        return take_states(super().state_dict(), self._checkpoint_layout)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this class's state dict, with the same codes if the values are the saved ones, or that of
        `torch.optim.AdamW` of any version, or of DeepSpeed's FusedAdam or DeepSpeedCPUAdam, whose moments
        are encoded.

        The formats, group size and `min_numel` of this optimizer stay as they are, and so do options that
        the other optimizer does not have.
        Raises ValueError, before anything is changed, if the state dict does not fit the parameters or comes
        from an optimizer whose steps are others.
        """
        own = self.layout_options()
        loaded = {}

        # torch would cast the moments to the parameters' type and hold all of them in FP32 at once:
        # it gets the parameter groups, with every hook in its place, and the states are loaded here
        def keep_states(_, incoming):
            check_layout(incoming)
            for i, group in enumerate(incoming["param_groups"]):
                kept = {k: v for k, v in group.items() if k not in LAYOUT and k not in STOCK_SWITCHES}
                try:
                    _check_options({**self.defaults, **kept})
                except ValueError as error:
                    raise ValueError(f"load_state_dict: parameter group {i}: {error}") from None
            check_groups(incoming["param_groups"])
            check_states(incoming, self.param_groups)
            loaded.update(incoming)
            return {**incoming, "state": {}}

        def load_states(_):
            self.restore_layout_options(own)
            self._load_states(loaded)

        hooks = (
            self.register_load_state_dict_pre_hook(keep_states),
            self.register_load_state_dict_post_hook(load_states, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def take_arrivals(self) -> str:
        """What became of the moments that were loaded or put into the state since the last call."""
        said = ", ".join(f"{count} {how}" for how, count in self._arrived.items())
        self._arrived.clear()
        return said

    def layout_options(self) -> list[dict[str, Any]]:
        """The options of each parameter group, for `restore_layout_options`."""
        return [{name: group[name] for name in self.defaults} for group in self.param_groups]

    def restore_layout_options(self, options: list[dict[str, Any]]) -> None:
        """Puts back of what `layout_options` gave the options that belong to the optimizer and not to a
        checkpoint, and those that the checkpoint did not have.

        Raises ValueError if the groups are now of an optimizer whose steps are others.
        """
        check_groups(self.param_groups)
        for group, own in zip(self.param_groups, options, strict=True):
            group |= {k: v for k, v in own.items() if k in LAYOUT or k in STOCK_SWITCHES or k not in group}
            # FusedAdam's; here every state counts its own
            group.pop("step", None)

    def _load_states(self, loaded: dict[str, Any]) -> None:
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            steps = steps_of(saved, loaded["state"])
            for p, index in zip(group["params"], saved["params"], strict=True):
                if entry := loaded["state"].get(index):
                    self.state[p] = {**entry, "step": steps[index]}
                    self._load_state(p, group, loaded, index)

    def _load_state(self, p: torch.Tensor, group: dict[str, Any], loaded: dict[str, Any], index: int) -> None:
        """Puts into the state of `p`, which holds the loaded entry `index`, tensors of its own."""
        state = self.state[p]
        remainder = state.pop("remainder", None)
        if is_remainder(remainder) and _has_remainder(p, group):
            state["remainder"] = laid_out_like(p, shard_of(remainder, p).to(p.device, copy=True))
        moment = None
        # the second first: the first may be relative to it
        for name in reversed(MOMENTS):
            layout = self._layout_of(p, group, name)
            moment, exact = restored(loaded, index, name, layout, group["group_size"], p, moment)
            state[name] = laid_out_like(p, moment)
            self._count_arrival(exact)
        self._pair(p)


def piece_begins(fragments: Sequence[Fragment], numel: int, group_size: int) -> tuple[tuple[int, bool], ...]:
    """First element of each piece of a partition of `numel` elements, and whether it keeps FP32 moments.

    A piece goes on over as many fragments as start at a whole group of it.
    """
    begins: list[tuple[int, bool]] = []

    def begin(at: int, kept: bool) -> None:
        if not begins or begins[-1][1] != kept or (not kept and (at - begins[-1][0]) % group_size):
            begins.append((at, kept))

    end, kept = 0, True
    for start, size, offset, kept in fragments:
        if start > end:
            begin(end, kept)
        begin(start, kept)
        # the part of a group that the fragment starts with
        head = -offset % group_size
        if 0 < head < size:
            begin(start + head, kept)
        end = start + size
    if end < numel or not begins:
        begin(end, kept)
    return tuple(begins)


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


def rounds_stochastically(group: dict[str, Any], codec: Codec) -> bool:
    """Whether second moments stored by `codec` are rounded stochastically in a parameter group."""
    rounding, beta2 = group["exp_avg_sq_rounding"], float(group["betas"][1])
    return rounding == "stochastic" or (rounding == "auto" and codec.fine and 1 - beta2 < 1 / 64)


def codec_of(group: dict[str, Any], name: str) -> Codec:
    """In which a parameter group stores one of `MOMENTS`."""
    second = get_codec(group["exp_avg_sq_format"])
    return second if name == "exp_avg_sq" else first_codec(group["exp_avg_format"], second)


def _has_remainder(p: torch.Tensor, group: dict[str, Any]) -> bool:
    return p.dtype == torch.bfloat16 and group["bf16_params"] == "exact"


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


def _cut(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    return x if piece.end - piece.begin == x.numel() else x.view(-1)[piece.begin : piece.end]


def _count(states: list[dict[str, Any]], found_inf: torch.Tensor | None) -> list[int] | list[torch.Tensor]:
    """Advances every `step`, unless the flag says that this one is skipped, and returns them."""
    on_device = [state["step"] for state in states if isinstance(state["step"], torch.Tensor)]
    for state in states:
        if not isinstance(state["step"], torch.Tensor):
            state["step"] += 1
    if not on_device:
        return [state["step"] for state in states]
    torch._foreach_add_(on_device, 1.0)
    if found_inf is None:
        return on_device
    counts = list(torch.stack(on_device).unbind())
    torch._foreach_sub_(on_device, (found_inf.to(counts[0].device) != 0).float().reshape(()))
    return counts


def _gather(steps: list[int] | list[torch.Tensor]) -> list[int] | torch.Tensor:
    return torch.stack(steps) if isinstance(steps[0], torch.Tensor) else steps


def _as_plain(value: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor:
    if value is None:
        return laid_out_like(p, torch.zeros(local(p).shape, device=p.device))
    held = local(value)
    return laid_out_like(p, held.decode()) if isinstance(held, Moment) else value.float()


def _check_names(group: dict[str, Any], known: dict[str, Any]) -> None:
    """Raises ValueError for an option that is nearly one of the known ones.

    Others are somebody's notes: schedulers' initial_lr, DeepSpeed's name and moe, Megatron's lr_mult.
    """
    for name in group.keys() - known.keys() - {"params", "param_names"}:
        meant = get_close_matches(str(name).lower(), ("params", *known), n=1, cutoff=0.85)
        if meant:
            raise ValueError(
                f"CoatAdamW: a parameter group has {name!r}, which is no option. Did you mean {meant[0]!r}? "
                "Name notes of your own otherwise."
            )


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
        if not (_is_number(options[name]) and options[name] >= 0):
            raise ValueError(f"CoatAdamW: {name} must be a number, 0 or more, found {options[name]!r}.")
    is_pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not is_pair or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"CoatAdamW: betas must be two numbers in [0, 1), found {betas!r}.")
    check_choice("CoatAdamW: exp_avg_sq_format", options["exp_avg_sq_format"], tuple(CODECS))
    # a format without signs would lose half of the first moment
    check_choice("CoatAdamW: exp_avg_format", options["exp_avg_format"], EXP_AVG_FORMATS)
    check_pair("CoatAdamW: ", options["exp_avg_format"], options["exp_avg_sq_format"])
    check_choice("CoatAdamW: group_size", options["group_size"], OPTIMIZER_GROUP_SIZES)
    check_choice("CoatAdamW: bf16_params", options["bf16_params"], BF16_PARAMS)
    check_choice("CoatAdamW: exp_avg_sq_rounding", options["exp_avg_sq_rounding"], ROUNDINGS)
    check_type("CoatAdamW: min_numel", options["min_numel"], int)
    if options["min_numel"] < 0:
        raise CoatConfigError(f"CoatAdamW: min_numel must be 0 or more, found {options['min_numel']}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _product(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Of two factors, of which None is 1."""
    return b if a is None else a if b is None else a.to(b.device) * b


def _check_tensors(p: torch.Tensor, state: dict[str, Any]) -> None:
    """Raises TypeError or ValueError for a parameter, gradient or state that the step cannot handle."""
    grad = p.grad
    what = f"CoatAdamW: a parameter of shape {tuple(p.shape)} on {p.device}"
    if is_distributed(p) != is_distributed(grad):
        raise TypeError(
            f"{what} is a {type(p).__name__}, its gradient a {type(grad).__name__}. Make both DTensors, or "
            "none."
        )
    if is_traceable_wrapper_subclass(local(p)):
        raise TypeError(
            f"{what} is a {type(local(p)).__name__}, which holds its values elsewhere. Give the optimizer a "
            "plain tensor, or a DTensor of plain shards."
        )
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
        if is_distributed(moment) and is_distributed(p) and moment.placements != p.placements:
            raise ValueError(
                f"{what} has {name} laid out as {moment.placements}, itself as {p.placements}. Redistribute "
                "parameters before the first step, or load the optimizer's state dict again."
            )
        if isinstance(local(moment), Moment) and moment.device != p.device:
            raise ValueError(
                f"{what} has {name} on {moment.device}. Move the model before the first step, or load the "
                "optimizer's state dict again."
            )
