"""Removed for `megatron_ext.spec`. Megatron 0.16 ignores an ImportError and trains without a spec."""

raise RuntimeError(
    "--spec megatron_ext.with_checkpoints was removed. Give --spec megatron_ext.spec coat_layer_spec, or "
    'coat_hybrid_stack_spec for a hybrid model, and write "fp8_activation_checkpointing": true and '
    '"optimizer": {"enabled": false} in the file of COAT_CONFIG. --use-checkpoint-args restores the '
    "checkpoint's --spec: leave it out."
)
