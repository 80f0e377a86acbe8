"""What state dicts hold of moments and remainders."""

from typing import Any

import torch

from coat_ds.optim.moment import Moment
from coat_ds.optim.shards import is_distributed, laid_out_like, local
from coat_ds.optim.stored_moment import StoredMoment
from coat_ds.optim.streaming import is_streaming


def states_to_save(packed: dict[str, Any], layout: str) -> dict[str, Any]:
    """The state dict of `torch.optim.Optimizer` with moments in the given layout, "stock" or "compressed"."""
    state: dict[Any, dict[str, Any]] = {}
    indices = {index for group in packed["param_groups"] for index in group["params"]}
    for index, entry in packed["state"].items():
        if index not in indices:
            # a note of the caller, not the state of a parameter
            state[index] = entry
            continue
        state[index] = dict(entry)
        for name, value in entry.items():
            moment = local(value)
            if isinstance(moment, Moment):
                state[index][name] = _given(value, moment, layout)
            elif name == "step":
                state[index][name] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
            elif name == "remainder":
                # the same bits as FP16: neither NCCL nor gloo sends int16
                state[index][name] = laid_out_like(value, local(value).view(torch.float16))
    return {**packed, "state": state}


def _given(value: torch.Tensor, moment: Moment, layout: str) -> torch.Tensor:
    if is_distributed(value):
        # on its device: NCCL cannot gather CPU tensors
        return laid_out_like(value, moment.decode())
    if layout == "compressed":
        return StoredMoment(moment.pieces, moment.shape, pair=moment.pair)
    # when streaming, torch.save decodes the moment as it writes it
    return moment.detach() if is_streaming() else moment.decode("cpu")
