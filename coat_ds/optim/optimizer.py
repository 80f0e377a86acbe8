"""AdamW whose moments are stored in eight bits each."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Any

import torch

from coat_ds.config import (
    CHECKPOINT_LAYOUTS,
    KEEP_FP32,
    check_choice,
    check_offload,
    check_type,
    name_patterns,
)
from coat_ds.log import log_rank_0, warn_rank_0
from coat_ds.optim.accounting import decay_line, layout_table, planned_bytes, states_line, warn_if_frozen
from coat_ds.optim.checks import (
    check_changes,
    check_grad_scale,
    check_listed_once,
    check_params,
    check_tensors,
)
from coat_ds.optim.host_states import HostStates, HostTransfers
from coat_ds.optim.layouts import Fragment, Layouts
from coat_ds.optim.loading import load_state, loading_states
from coat_ds.optim.moment import as_plain
from coat_ds.optim.options import (
    MOMENTS,
    STOCK_SWITCHES,
    Rule,
    check_names,
    check_options,
    check_patterns,
    check_seed,
)
from coat_ds.optim.release import Release
from coat_ds.optim.shards import is_distributed, shape_of
from coat_ds.optim.states import convert_layout, prepare_state, state_device
from coat_ds.optim.step import Scaling, unscale_, update_group
from coat_ds.optim.stored_moment import states_to_save


class CoatAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` with compressed moments: same arguments, same update, computed in FP32.

    params: parameters, named parameters or parameter groups; updated in place; FP32 or BF16, any shape and
        strides. Gradients are FP32, BF16 or FP16.
    lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`; an lr on the device is read there.
    capturable: keep `step` on the device, so that a step may be captured in a CUDA graph.
    amsgrad, differentiable: only the default values are accepted.
    foreach, fused: of no effect; there is one implementation.
    exp_avg_format, exp_avg_sq_format: storage of the two moments, by name (`coat_kernels.codecs.CODECS`).
        None is "ratio8" with "log8", else "fp8_expanded". The paper's format is "fp8_expanded" for both.
        "log8" is rounded stochastically if 1 - beta2 is below 1/64. A step decays a second moment by the
        fraction 1 - beta2. If that is less than half the distance between two codes, rounding to nearest
        undoes the decay, except that of a group's scale. The codes of "log8" are close enough for stochastic
        rounding to correct this with little noise. Its dither is deterministic: a low-discrepancy sequence
        over the steps, independent of how tensors are sharded.
    min_numel: tensors with fewer elements keep FP32 moments; 0 compresses everything.
    bf16_params: how BF16 parameters are updated. With "exact" `state[p]["remainder"]`, int16, extends each
        parameter to an FP32 master with the same bits as in an FP32 run. With "stochastic" a weight is
        rounded up with a probability equal to the dropped fraction of a BF16 step. The noise is a hash of
        the element, its gradient, the step and the seed, so replicas of a weight stay equal on all ranks.
        With "nearest" updates below half a BF16 step are lost, as in `torch.optim.AdamW`.
        Weights may be edited between steps. "exact" then continues from the edited value plus the remainder,
        at most half a BF16 step. It keeps the remainder because masks and clamps write all weights and change
        few. Zeros and non-finite values are taken exactly. After replacing all weights, call
        `state[p]["remainder"].zero_()` to continue from exactly their values.
    keep_fp32: which other tensors keep FP32 moments: patterns of names, for parameters given with names, or
        a function of (name or None, parameter).
    seed: of the stochastic rounding of BF16 parameters; the same on all ranks.
    offload: where moments and remainders are. The default "none" keeps them on the parameters' device. With
        "cpu" they are in one allocation of pinned host memory. A step copies them to the GPU in chunks, and
        back. The results have the same bits. A step takes as long as the copies, returns when they have
        ended, and cannot be captured in a CUDA graph. A number: GB (10^9 bytes) of states that stay on the
        device, whole tensors in their order. This is decided when the first state is created, and logged.
        Parameters on the CPU pass through the GPU with their states, unless it is "none".
    in_framework: a framework builds this optimizer. It logs how states are stored once it has placed them,
        which the constructor does otherwise, and it may keep FP32 masters of parameters of other types.
    checkpoint_layout: the contents of `state_dict`. "stock": FP32 moments, as in `torch.optim.AdamW`.
        "compressed": the stored codes, 2.1 bytes per parameter instead of 8, which only this class reads.

    All options may differ between parameter groups, except the implementation switches, keep_fp32, seed,
    checkpoint_layout and offload. A change in `param_groups` takes effect at the next step.
    Formats and min_numel, which determine the stored states, may not change there after the first
    step.

    Parameters may be DTensors (FSDP2's `fully_shard`, HSDP, tensor parallelism): each rank steps its shard.
    Moments are then DTensors laid out like the parameter, also in `state_dict`, in FP32;
    `torch.distributed.checkpoint` reads and writes them at any number of ranks. `min_numel` and `keep_fp32`
    apply to the whole parameter. Groups are counted from the start of each shard. The codes are the same at
    any number of ranks if each shard consists of whole groups. An example: dimension 0 is sharded, and its
    rows have a multiple of 128 elements. Otherwise a load that cuts a group at another place
    re-encodes it, and its moments then differ by the format's rounding.

    `state[p]` holds the `Moment`s `exp_avg` and `exp_avg_sq`, and `step`, an FP32 tensor on the CPU, as
    `torch.optim.AdamW`'s. A gradient scaler or `capturable` needs `step` on the parameter's device. The
    next step encodes a plain tensor that was put in a moment's place. `torch.amp.GradScaler`'s flag of
    non-finite gradients skips the step on the device.

    Raises ValueError for values that `torch.optim.AdamW` rejects too, and for an unknown format or size.
    """

    # GradScaler then leaves scale and flag to `step`, as attributes grad_scale and found_inf
    _step_supports_amp_scaling = True
    # these two are not pickled: hooks are on the parameters, and a copy checks for itself
    _release: Release | None = None
    # the options of the parameter groups when states were last created or stepped
    checked_options: Sequence[dict[str, Any]] = ()

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
        exp_avg_format: str | None = None,
        exp_avg_sq_format: str = "log8",
        min_numel: int = 4096,
        bf16_params: str = "exact",
        keep_fp32: Rule = KEEP_FP32,
        seed: int = 0,
        checkpoint_layout: str = "stock",
        offload: str | float = "none",
        in_framework: bool = False,
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
            "min_numel": min_numel,
            "bf16_params": bf16_params,
        }
        check_options(defaults)
        check_choice("CoatAdamW: checkpoint_layout", checkpoint_layout, CHECKPOINT_LAYOUTS)
        check_seed(seed)
        check_offload("CoatAdamW: offload", offload)
        if not callable(keep_fp32):
            keep_fp32 = name_patterns("CoatAdamW: keep_fp32", keep_fp32)
        self._seed, self._checkpoint_layout, self._offload = seed, checkpoint_layout, offload
        self.layouts = Layouts(keep_fp32)
        self._in_framework = in_framework
        self._loaded: Counter[str] = Counter()
        self._host = _host_states(offload)
        # by name: in a subclass, DeepSpeed's FusedAdam may follow this class in the MRO
        torch.optim.Optimizer.__init__(self, params, defaults)
        if not callable(keep_fp32):
            check_patterns(keep_fp32, self.param_groups)
        if line := decay_line(self, "coat.optimizer." if in_framework else "CoatAdamW: "):
            warn_rank_0(line)
        if not in_framework:
            log_rank_0(f"CoatAdamW: {states_line(self, planned_bytes(self))}")

    def __getstate__(self) -> dict[str, Any]:
        own = ("_seed", "_checkpoint_layout", "_offload", "_loaded", "layouts", "_in_framework")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch also calls this when it loads a state dict, with states and parameter groups only
        if "layouts" in state:
            state = {**state, "_host": _host_states(state["_offload"])}
        torch.optim.Optimizer.__setstate__(self, state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`; the group may set every option that may differ between groups.

        Raises ValueError, and adds nothing, for options that the constructor would refuse, and TypeError for
        trained parameters that are neither FP32 nor BF16.
        """
        if isinstance(param_group, dict):
            check_names(param_group, self.defaults, self.common_options())
            check_options({**self.defaults, **param_group})
        torch.optim.Optimizer.add_param_group(self, param_group)
        try:
            check_params(self.param_groups[-1]["params"], self._in_framework, self._checkpoint_layout)
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    @torch._disable_dynamo
    @torch.no_grad()
    # torch's two overloads have no keyword
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: torch.Tensor | None = None
    ) -> float | None:
        """One step; returns the loss of `closure`.

        grad_scale: tensor of one element, such as a clip coefficient. Gradients are multiplied by it in FP32
        while they are read, on the device and without a synchronization.

        Raises TypeError or ValueError, before anything is changed, for parameters, gradients and a grad_scale
        of an unsupported type, shape or device, and for unsupported options in `param_groups`.
        """
        check_changes(self)
        if grad_scale is not None:
            check_grad_scale(grad_scale)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        scaler_scale = getattr(self, "grad_scale", None)
        if self._release is not None:
            self._release.end(self, grad_scale, scaler_scale, found_inf)
        if is_distributed(grad_scale):
            # the norm of sharded gradients is a partial sum until this all-reduce
            grad_scale = grad_scale.full_tensor()
        if scaler_scale is not None:
            inverse = 1 / scaler_scale
            grad_scale = inverse if grad_scale is None else grad_scale * inverse
        work = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        if not any(params for _, params in work):
            warn_if_frozen(self.param_groups)
        transfers = None if self._host is None else HostTransfers(self._host)
        self._update(work, Scaling(grad_scale, found_inf), transfers)
        if transfers is not None:
            transfers.end()
        if scaler_scale is not None:
            # torch's optimizers leave unscaled gradients too; training loops log them after the step
            unscale_([p for _, params in work for p in params], inverse)
        return loss

    def _update(
        self,
        work: list[tuple[dict[str, Any], list[torch.Tensor]]],
        scaling: Scaling,
        transfers: HostTransfers | None,
    ) -> None:
        """Steps parameters, which all have gradients, by group."""
        for group, params in work:
            check_listed_once(params)
            for p in params:
                check_tensors(p, self.state.get(p, {}), state_device(self, p, group))
        counted = scaling.found_inf is not None
        for group, params in work:
            if params:
                states = [prepare_state(self, p, group, count_on_device=counted) for p in params]
                update_group(group, params, states, scaling, seed=self._seed, transfers=transfers)

    def release_gradients(self, clip_by_last_norm: float | None = None) -> None:
        """From now on backward steps each parameter as soon as its gradient is final, and frees the gradient.
        Gradients then never exist all at once, and states in host memory stream while backward runs. `step`,
        after every backward, ends the step and applies what is left. Weights have the same bits as without
        release.

        Call it for the parameters as they are trained: after `fully_shard`, for example. Changes of
        `param_groups`, such as the lr, take effect at the next backward. Norms and clipping that read
        gradients after backward find none.

        clip_by_last_norm: gradients are multiplied by this number over the norm of all gradients of the
            backward before, if that norm is larger. The first backward of a process only measures the norm,
            and its gradients are dropped: unclipped ones would enlarge second moments, and so slow down many
            steps. None: no clipping.

        Raises ValueError for optimizers of DeepSpeed and Megatron, which step other tensors than those that
        backward computes gradients of, and for clip_by_last_norm with DTensors. Backward or step raise
        RuntimeError for gradient accumulation, gradient scalers, grad_scale, and several processes without
        FSDP2.
        """
        if type(self) is not CoatAdamW or self.layouts.fragments or self._release is not None:
            raise ValueError(
                "CoatAdamW.release_gradients: expected one call, and a model's own parameters; found "
                f"a second call, or {type(self).__name__} of partitions. DeepSpeed and Megatron free "
                "gradients by their own options."
            )
        if clip_by_last_norm is not None:
            check_type("CoatAdamW.release_gradients: clip_by_last_norm", clip_by_last_norm, float)
            if not clip_by_last_norm > 0:
                raise ValueError(
                    "CoatAdamW.release_gradients: clip_by_last_norm: expected a number above 0, found "
                    f"{clip_by_last_norm}. None clips nothing."
                )
            if any(is_distributed(p) for group in self.param_groups for p in group["params"]):
                raise ValueError(
                    "CoatAdamW.release_gradients: clip_by_last_norm: found DTensors, whose norm needs all "
                    "ranks. Use None."
                )
        self._release = Release(self, clip_by_last_norm)

    def common_options(self) -> dict[str, Any]:
        """The options that must be equal in all parameter groups."""
        return {
            "keep_fp32": self.layouts.keep_fp32,
            "checkpoint_layout": self._checkpoint_layout,
            "seed": self._seed,
            "offload": self._offload,
        }

    def init_states(self) -> None:
        """Creates missing states of all parameters, and encodes moments that are plain tensors.

        Raises ValueError for options in `param_groups` that `step` does not support.
        """
        check_changes(self)
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    prepare_state(self, p, group)
        for p, group_index in self.layouts.group_index.items():
            prepare_state(self, p, self.param_groups[group_index])

    @property
    def offloads(self) -> bool:
        """Whether states may be in host memory, whatever the device of the parameters."""
        return self._host is not None

    def is_offloaded(self, p: torch.Tensor) -> bool:
        """Whether the state of `p`, which exists, is in host memory, whatever the device of `p`."""
        return self._host is not None and self._host.offloaded[p]

    def set_fragments(self, placed: Iterable[tuple[torch.Tensor, Iterable[Fragment], int]]) -> None:
        """Notes the fragments of flat partitions such as ZeRO's, and creates the states of the partitions.

        Groups of moments start at the first element of each parameter, wherever it lies in the partition. So
        the codes of a group are the same bits at any number of ranks. If the border between two ranks cuts a
        group, each rank holds its part as a separate group. Existing moments are re-encoded if their groups
        change.

        placed: partitions; the parts of parameters in each, ascending by start, where all other elements are
            padding; and its parameter group. ZeRO-3 puts a partition into the group during a step only.
        """
        placed = list(placed)
        for param, fragments, group_index in placed:
            self.layouts.fragments[param] = tuple(fragments)
            self.layouts.group_index[param] = group_index
        for param, _, group_index in placed:
            group = self.param_groups[group_index]
            prepare_state(self, param, group)
            convert_layout(self, param, group)

    def layout(self, names: Mapping[torch.Tensor, str] = MappingProxyType({})) -> str:
        """A table of how the moments of each tensor are stored, with their bytes; equal rows are counted. For
        a DTensor the bytes are those of all shards.

        names: of parameters that were given without a name.
        """
        return layout_table(
            (names.get(p, name), shape_of(p), *(codec for _, codec in codecs))
            for group in self.param_groups
            for name, p in zip(group.get("param_names", repeat("")), group["params"], strict=False)
            for codecs in zip(*(self.layouts.layout_of(p, group, moment) for moment in MOMENTS), strict=True)
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
        return as_plain(exp_avg, param), as_plain(exp_avg_sq, param)

    def state_dict(self) -> dict[str, Any]:
        """A state dict in the layout of `torch.optim.AdamW`, with FP32 moments on the CPU, from which
        `load_state_dict` restores the same codes. Tensors are decoded one at a time. With `checkpoint_layout`
        "compressed" moments hold the stored codes. Moments of DTensors are FP32 DTensors on the parameter's
        device, which take memory there while the dict exists. Remainders are viewed as FP16, a dtype that
        collectives can send.
        """
        return states_to_save(super().state_dict(), self._checkpoint_layout)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, of any version of `torch.optim.AdamW`, or of DeepSpeed's
        FusedAdam or DeepSpeedCPUAdam. Unchanged values of this class get the saved codes; other moments are
        encoded.

        The formats and `min_numel` of this optimizer do not change, nor do options that the saved
        optimizer does not have.
        Raises ValueError, before anything is changed, if the state dict does not fit the parameters or comes
        from an optimizer with another update than AdamW's.
        """
        with loading_states(self):
            super().load_state_dict(state_dict)

    # loads the state of one parameter; Megatron's optimizer overrides it
    _load_state = load_state

    def pop_load_summary(self) -> str:
        """How many moments were loaded or put into the state since the last call, by outcome."""
        summary = ", ".join(f"{count} {how}" for how, count in self._loaded.items())
        self._loaded.clear()
        return summary

    def count_loaded(self, exact: bool) -> None:
        self._loaded["restored to the bit" if exact else "with groups encoded from FP32"] += 1


def _host_states(offload: str | float) -> HostStates | None:
    if offload == "none":
        return None
    return HostStates(0 if offload == "cpu" else 1e9 * float(offload))
