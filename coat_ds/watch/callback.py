"""Readings in what Hugging Face's Trainer logs. transformers is imported with this file."""

from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback

from coat_ds.config import WatchConfig
from coat_ds.log import log_once
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.watch.readings import Reading
from coat_ds.watch.watch import Watch


class Callback(TrainerCallback):
    """Passes each reading to `trainer.log`, and so to every logger of the Trainer.

        trainer.add_callback(coat_ds.watch.Callback(trainer))

    config: the block `coat.watch`. Under DeepSpeed drop it: the JSON has the block.

    The log numbers a reading by the step that logs it. The reading is of one step earlier: coat/step.

    Raises ValueError, when training begins, if the model's optimizer is no CoatAdamW, or DeepSpeed's
    engine is not watched.
    """

    def __init__(self, trainer: Trainer, config: WatchConfig | Mapping[str, Any] | None = None):
        self.trainer, self.config = trainer, config
        # the engine's, or else this callback's own
        self._watch: Watch | None = None
        self._own: Watch | None = None

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        # of a training that was interrupted
        self.on_train_end(args, state, control)
        coat = getattr(getattr(self.trainer, "deepspeed", None), "coat", None)
        if coat is None:
            optimizer = getattr(optimizer, "optimizer", optimizer)
            if not isinstance(optimizer, CoatAdamW):
                raise ValueError(
                    f"coat_ds.watch.Callback: expected a CoatAdamW, found {type(optimizer).__name__}. Give "
                    "one to the Trainer as `optimizers`, or add the coat block to its DeepSpeed config."
                )
            self._own = self._watch = Watch(model, optimizer, self.config, [self._log])
            self._own.go_on_from(state.global_step)
            return
        if coat.watch is None:
            raise ValueError(
                "coat_ds.watch.Callback: the engine is not watched. Set coat.watch in its DeepSpeed "
                "config to true, or remove the callback."
            )
        if self.config is not None:
            log_once(
                f"coat_ds.watch.Callback: config: found {self.config!r}, of no effect under DeepSpeed, where "
                "coat.watch of the JSON is the config. Drop it."
            )
        self._watch = coat.watch
        self._watch.add(self._log)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self._own is not None:
            self._own.end_step(state.global_step)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        if self._own is not None:
            self._own.close()
        elif self._watch is not None:
            self._watch.callbacks.remove(self._log)
        self._watch = self._own = None

    def _log(self, reading: Reading) -> None:
        self.trainer.log({"coat/step": reading.step, **reading.flat()})
