"""`deepspeed.initialize` that honours the `"coat"` block. DeepSpeed is imported when it is called."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from coat_ds.zero import switch
from coat_ds.zero.deepspeed_config import check

CONFIG_ARGS = ("deepspeed_config", "deepscale_config")


def initialize(
    args=None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    distributed_port: int = 29500,
    mpu=None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: str | Mapping[str, Any] | None = None,
    mesh_param=None,
    config_params: str | Mapping[str, Any] | None = None,
):
    """`deepspeed.initialize`: same arguments, same result (engine, optimizer, dataloader, scheduler).

    Without a `"coat"` block, or with a disabled one, this is `deepspeed.initialize`. With one, the
    `"optimizer"` section (Adam or AdamW) makes a `CoatAdamW`, and `engine.coat` says what is (`Status`).
    The config that was given is not changed. An Adam or AdamW of torch or DeepSpeed given as `optimizer`
    becomes a `CoatAdamW`, the same object; a `CoatAdamW` is used as it is: the block's formats do not apply.

    Raises CoatConfigError for a block or a combination that cannot be honoured, before anything is built,
    and ModuleNotFoundError without DeepSpeed.
    """
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ModuleNotFoundError(
            'coat_ds.initialize: DeepSpeed is not installed. pip install "coat-train[deepspeed]"; without '
            "DeepSpeed take coat_ds.convert and coat_ds.CoatAdamW.",
            name="deepspeed",
        ) from None

    check(_load_config(args, config, config_params), optimizer)
    with switch.installed():
        result = deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=config,
            mesh_param=mesh_param,
            config_params=config_params,
        )
    return result


def _load_config(args, config, config_params) -> dict[str, Any]:
    """The JSON config as a dict, found where DeepSpeed looks for it; empty if there is none."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    for source in (config, config_params, *(getattr(args, name, None) for name in CONFIG_ARGS)):
        if source is not None:
            return dict(load_ds_config(source))
    return {}
