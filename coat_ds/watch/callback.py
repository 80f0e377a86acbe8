"""Readings in what Hugging Face's Trainer logs. transformers is imported with this file."""

from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback

from coat_ds.config import WatchConfig
from coat_ds.layers.log import say_once
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.watch.fallback import KEY
from coat_ds.watch.outs import Reading
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
        self._watch: Watch | None = None
        self._is_own = False

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        # of a training that was interrupted
        self.on_train_end(args, state, control)
        engine = getattr(self.trainer, "deepspeed", None)
        coat = getattr(engine, "coat", None)
        if coat is not None:
            if coat.watch is None:
                raise ValueError(
                    "coat_ds.watch.Callback: the engine is not watched. Set coat.watch in its DeepSpeed "
                    "config to true, or remove the callback."
                )
            if self.config is not None:
                say_once(
                    f"coat_ds.watch.Callback: config: found {self.config!r}, of no effect: under DeepSpeed "
                    "coat.watch says how. Drop it."
                )
            self._watch, self._is_own = coat.watch, False
        else:
            optimizer = getattr(optimizer, "optimizer", optimizer)
            if not isinstance(optimizer, CoatAdamW):
                raise ValueError(
                    f"coat_ds.watch.Callback: expected a CoatAdamW, found {type(optimizer).__name__}. Give "
                    "one to the Trainer as `optimizers`, or add the coat block to its DeepSpeed config."
                )
            self._watch = Watch(
                model,
                optimizer,
                self.config,
                # a run that resumes goes on counting
                steps_done=lambda: self.trainer.state.global_step,
            )
            self._is_own = True
            self._watch.resume(state.stateful_callbacks.get(KEY, {}))
        self._watch.add(self._log)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self._is_own:
            self._watch.end_step()
            if control.should_save:
                self._watch.take_in()
            state.stateful_callbacks[KEY] = self._watch.fallback.state()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        if self._watch is None:
            return
        if self._is_own:
            self._watch.close()
        self._watch.outs.remove(self._log)
        self._watch = None

    def _log(self, reading: Reading) -> None:
        self.trainer.log({"coat/step": reading.step, **reading.flat()})
