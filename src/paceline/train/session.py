"""Drives a trainer: logs, held-out figures, checkpoints, and what a stream asks for."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import StreamError, TrainingError
from paceline.progress import progress_bar
from paceline.runlog import LOG_FILE
from paceline.train.checkpoint import save_checkpoint
from paceline.train.loop import Trainer, append_record, figures, over_ranks

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """One run of a trainer from step `start` on, in the folder of its stage.

    tell: is given every record of the log too. next_step: the optimiser step that has not been done
    yet.
    """

    trainer: Trainer
    folder: Path
    start: int
    tell: Callable[[dict[str, Any]], None]
    next_step: int = field(init=False)
    _saved: int = field(init=False)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self.next_step = self._saved = self.start
        self._began = time.perf_counter()

    def run(self) -> None:
        """Train to the end. A stream whose other side is lost leaves a checkpoint."""
        total, ranks = self.trainer.total_steps, self.trainer.ranks
        try:
            with progress_bar("train", total - self.start, "step", ranks.is_first) as bar:
                for step, record in self.trainer.run(self.start):
                    if record is None:
                        self._answer_pause(step.num_windows)
                        continue
                    self.next_step = step.number + 1
                    bar.advance(1, self._log(record))
                    if self._is_time(self.trainer.options.checkpoint_every):
                        self._save()
                        if self.trainer.plan.num_epochs == 1:
                            self.trainer.store.release(step.num_windows)
                    self.trainer.store.check_writer()
        except StreamError:
            # Other ranks may be a step further on; they cannot save together.
            if ranks.count == 1:
                self._save()
            raise
        if self.next_step < total:
            logger.warning("train: the samples ended after %d of %d steps", self.next_step, total)

    def _log(self, record: dict[str, Any]) -> str:
        """Write what is due. Returns a note for the progress bar."""
        options, note = self.trainer.options, ""
        is_last = self.next_step == self.trainer.total_steps
        if self.next_step % options.log_every == 0 or is_last:
            record = over_ranks(record, self.trainer.ranks)
            line = _plain_record(record, options.step_decay, time.perf_counter() - self._began)
            self._write(line)
            note = f"loss {line['loss']:.3f}"
        if options.eval_every and self._is_time(options.eval_every):
            self._write({"step": self.next_step, "heldout": self.trainer.heldout()})
        return note

    def _write(self, record: dict[str, Any]) -> None:
        self.trainer.ranks.check()
        if not self.trainer.ranks.is_first:
            return
        append_record(self.folder / LOG_FILE, record)
        self.tell(record)

    def _is_time(self, every: int) -> bool:
        """The end of the run has its own figures and needs no checkpoint."""
        return self.next_step % every == 0 and self.next_step != self.trainer.total_steps

    def _answer_pause(self, num_windows: int) -> None:
        if self.trainer.plan.num_epochs > 1:
            raise StreamError(
                f"{self.trainer.store.folder}: the byte budget is full, and "
                f"{self.trainer.plan.num_epochs} epochs need the whole store. Raise `stream_bytes` "
                "of extract, or train for one epoch; then start both sides again."
            )
        self._save()
        self.trainer.store.answer_pause(num_windows)

    def _save(self) -> None:
        if self.next_step > self._saved:
            trainer = self.trainer
            save_checkpoint(self.folder, self.next_step, trainer.optimiser, trainer.ranks)
            self._saved = self.next_step


def _plain_record(record: dict[str, Any], step_decay: float, elapsed_s: float) -> dict[str, Any]:
    seen = figures(record.pop("sums"), step_decay)
    loss = float(record["loss"])
    if not loss == loss:
        raise TrainingError(f"loss is {loss} at optimiser step {record['step']}")
    speed = {
        "tokens_per_s": record["tokens"] / record["step_s"],
        "rows_per_s": record["rows"] / record["step_s"],
    }
    read = {"loss": loss, "grad_norm": float(record["grad_norm"])}
    return {**record, **speed, **read, "elapsed_s": elapsed_s, "train": seen}
