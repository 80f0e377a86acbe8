"""`CoatAdamW` with the interface of Transformer Engine's FusedAdam, as Megatron's optimizers expect it: the
distributed one, with and without `--use-precision-aware-optimizer`, and those that are not distributed.

With this optimizer the precision-aware one needs no Transformer Engine: Megatron's check for it passes. And a
distributed optimizer without Transformer Engine or apex can load its checkpoint. Stock AdamW cannot, since
Megatron reads the step count of a state that does not exist yet; MegatronAdamW's always exists.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer

from coat_ds.optim.layouts import Fragment
from coat_ds.optim.moment import Moment, pair_up
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.optim.options import MOMENTS, SECOND_FIRST
from coat_ds.optim.states import prepare_state, set_moment
from coat_ds.optim.stored_moment import states_to_save
from coat_kernels.adamw import join_master, split_master
from coat_kernels.codecs import parts_of


class MegatronAdamW(CoatAdamW, torch.optim.AdamW):
    """`CoatAdamW` with the arguments that Megatron gives to Transformer Engine's FusedAdam.

    use_decoupled_grad: gradients are in `decoupled_grad` of each parameter, FP32 or BF16, and parameters
        are the model's own, BF16 with the 16 bits that make an FP32 master in the state.
    counts_in_groups: Megatron reads the step count from the parameter groups, where FusedAdam stores it, and
        not from the states.
    options: `CoatAdamW`'s.

    The other arguments are not read: `unsupported.check_optimizer` has refused all values but one, and the
    file of `COAT_CONFIG` sets the formats of moments.
    """

    def __init__(
        self,
        params: Iterable,
        *,
        adam_w_mode: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = True,
        counts_in_groups: bool = False,
        **options: Any,
    ):
        self._decoupled, self._distributed = use_decoupled_grad, False
        self._counts_in_groups = counts_in_groups
        super().__init__(params, **options)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_decoupled", "_distributed", "_counts_in_groups")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> float | None:
        """Same as `CoatAdamW.step`."""
        if not self._decoupled:
            return super().step(closure, **options)
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            grad = getattr(p, "decoupled_grad", None)
            if grad is not None and grad.dtype != p.dtype:
                # torch requires a gradient of the parameter's dtype unless `grad_dtype` is None; it cannot be
                # set on FP32 parts, which are views of the model's parameters
                p.grad_dtype = None
            p.grad = grad
        try:
            return super().step(closure, **options)
        finally:
            for p in params:
                p.grad = None

    def link(self, groups: Iterable[tuple[int, torch.Tensor, Fragment]], distributed: bool) -> None:
        """Registers the parts of the model's parameters that this optimizer holds (the group, the tensor, and
        its place in the parameter), and creates the states."""
        self._distributed = distributed
        self.set_fragments((p, [fragment], index) for index, p, fragment in groups)

    def tensors_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """`param`, `exp_avg` and `exp_avg_sq` of `p`, FP32 and of its shape. An FP32 parameter is returned
        itself; the rest is computed and lies on the CPU."""
        state, param = self.state[p], p
        if "remainder" in state:
            param = torch.empty(p.shape, dtype=torch.float32, device="cpu")
            for part in parts_of(p.numel()):
                held = (x.view(-1)[part].to(p.device) for x in (p, state["remainder"]))
                param.view(-1)[part] = join_master(*held)
        return {
            "param": param if param.dtype == torch.float32 else param.cpu().float(),
            **{name: state[name].decode("cpu") for name in MOMENTS},
        }

    @torch.no_grad()
    def take_tensors(self, p: torch.Tensor, group: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Loads what `tensors_of` returned, or stock AdamW's tensors."""
        state = self.state[p]
        if "remainder" in state:
            for part in parts_of(p.numel()):
                master = tensors["param"].reshape(-1)[part].to(p.device, torch.float32)
                for old, new in zip((p, state["remainder"]), split_master(master), strict=True):
                    old.view(-1)[part] = new
        else:
            p.copy_(tensors["param"])
        for name in SECOND_FIRST:
            set_moment(self, p, group, name, tensors[name])
        pair_up(state, p)

    def state_dict(self) -> dict[str, Any]:
        """The layout of `torch.optim.AdamW`, and FusedAdam's step count if Megatron reads that one.

        Moments are FP32 on the CPU; under the distributed optimizer, which writes them by `tensors_of`, they
        are the optimizer's own.
        """
        packed = torch.optim.Optimizer.state_dict(self)
        for group in packed["param_groups"]:
            steps = [int(packed["state"][i]["step"]) for i in group["params"] if packed["state"].get(i)]
            if self._counts_in_groups and steps:
                group["step"] = max(steps)
        return states_to_save(packed, "compressed" if self._distributed else "stock")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, of `torch.optim.AdamW` or of FusedAdam."""
        state = {index: dict(entry) for index, entry in state_dict["state"].items()}
        groups = []
        for saved in state_dict["param_groups"]:
            group = dict(saved)
            step = group.pop("step", None)
            for index in saved["params"]:
                entry = state.get(index, {})
                if self._counts_in_groups and step is not None:
                    entry["step"] = step
                # Megatron leaves out counts of 0
                entry.setdefault("step", step or 0)
            groups.append(group)
        super().load_state_dict({"state": state, "param_groups": groups})

    def _load_state(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if (remainder := state.get("remainder")) is not None and remainder.dtype == torch.float16:
            # the dtype in which state dicts hold it
            state["remainder"] = remainder.view(torch.int16)
        for name in SECOND_FIRST:
            value = state[name]
            if isinstance(value, Moment):
                # the optimizer's own, which Megatron passes through
                state[name] = Moment(value.pieces, value.shape, pair=value.pair)
            else:
                set_moment(self, p, group, name, value)
        prepare_state(self, p, group)


def linked(optimizer: MegatronOptimizer) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, int]]:
    """Group, parameter of the model, the tensor that the optimizer holds of it, and the tensor's first
    element in the parameter."""
    if isinstance(optimizer, DistributedOptimizer):
        for model_param, (group, order) in optimizer.model_param_group_index_map.items():
            held = optimizer.optimizer.param_groups[group]["params"][order]
            yield group, model_param, held, optimizer._get_model_param_range_map(model_param)["param"].start
    elif isinstance(optimizer, FP32Optimizer):
        for index, group in enumerate(optimizer.optimizer.param_groups):
            for p in group["params"]:
                yield index, p, p, 0
    else:
        mains = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
        for index, (models, held) in enumerate(mains):
            for model_param, main_param in zip(models, held, strict=True):
                yield index, model_param, main_param, 0
        for index, params in enumerate(optimizer.fp32_from_fp32_groups):
            for p in params:
                yield index, p, p, 0
