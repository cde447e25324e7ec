"""Drives a trainer: logs, held-out figures, checkpoints, and what a stream asks for."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.device import peak_bytes
from paceline.errors import StreamError, TrainingError
from paceline.progress import progress_bar
from paceline.runlog import LOG_FILE, acceptance_of, append_record, cut_torn_line
from paceline.train.batches import Step
from paceline.train.best import BestDraft
from paceline.train.checkpoint import save_checkpoint
from paceline.train.heldout import choose_samples, heldout_figures, no_length, no_samples
from paceline.train.loop import Trainer, figures, over_ranks
from paceline.train.nan_batch import keep_step
from paceline.train.optimiser import NotFinite
from paceline.train.pace import Pace

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """One run of a trainer from step `start` on, in the folder of its stage.

    product_flops: what a device reaches in large matrix products, FLOP per second. best: is offered
    the draft at every look at held-out data, where such are made on the way. tell: is given every
    record of the log too. next_step: the optimiser step that has not been done yet. heldout: the
    figures of the last look.
    """

    trainer: Trainer
    folder: Path
    start: int
    product_flops: float
    best: BestDraft
    tell: Callable[[dict[str, Any]], None]
    heldout: dict[str, Any] | None = field(init=False, default=None)
    next_step: int = field(init=False)
    _saved: int = field(init=False)
    _began: float = field(init=False)
    _pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        self.next_step = self._saved = self.start
        self._began = time.perf_counter()

    def run(self) -> None:
        """Train to the end. A stream whose other side is lost leaves a checkpoint, a step that is
        not finite itself (see `nan_batch`)."""
        if self.trainer.ranks.is_first:
            cut_torn_line(self.folder)
        try:
            self._run()
            self.trainer.optimiser.check()
        except NotFinite as found:
            told = keep_step(self.folder, self.trainer, self.best.about, found)
            raise TrainingError(told) from found
        # Whatever becomes of the last look, no step is made twice.
        self._save()
        self._look()

    def _run(self) -> None:
        total, ranks = self.trainer.total_steps, self.trainer.ranks
        self._pace = Pace()
        try:
            with progress_bar("train", total - self.start, "step", ranks.is_first) as bar:
                for step, record in self.trainer.run(self.start):
                    if record is None:
                        with self._pace.aside():
                            self._answer_pause(step.num_windows)
                        continue
                    self.next_step = step.number + 1
                    bar.advance(1, self._log(record))
                    with self._pace.aside():
                        self._look_and_save(step)
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
        self._pace.add(record)
        is_last = self.next_step == self.trainer.total_steps
        if self.next_step % self.trainer.options.log_every and not is_last:
            return ""
        self.trainer.optimiser.check()  # the log reads from the device anyway
        line = self._plain(over_ranks({**record, **self._pace.means()}, self.trainer.ranks))
        self._write(line)
        self._pace.restart()
        return f"loss {line['loss']:.3f}"

    def _look_and_save(self, step: Step) -> None:
        """What is due."""
        options = self.trainer.options
        if options.eval_every and self._is_time(options.eval_every):
            self._look()
        if self._is_time(options.checkpoint_every):
            self._save()
            if self.trainer.plan.num_epochs == 1:
                self.trainer.store.release(step.num_windows)

    def _look(self) -> None:
        """Held-out figures of the draft as it is now."""
        trainer, options = self.trainer, self.trainer.options
        choose = lambda: choose_samples(trainer.store, self.folder, options.eval_samples)
        samples = trainer.ranks.from_first(choose)
        self.heldout = heldout_figures(trainer, samples, options.eval_draft_tokens)
        if self.heldout is None:
            if options.load_best_model_at_end:
                raise no_samples(trainer.store)
            return
        self._write({"step": self.next_step, "heldout": self.heldout})
        if options.load_best_model_at_end and acceptance_of(self.heldout) is None:
            raise no_length(trainer.store, options)
        if options.eval_every:
            self.best.offer(trainer, self.next_step, self.heldout)

    def _plain(self, record: dict[str, Any]) -> dict[str, Any]:
        """A step's record as the log has it. All ranks enter."""
        sums, seconds, ranks = record.pop("sums"), self._pace.seconds(), self.trainer.ranks
        return {
            **record,
            "step_s": seconds,
            "tokens_per_s": record["tokens"] / seconds,
            "rows_per_s": record["rows"] / seconds,
            "wait_share": record["wait_s"] / seconds,
            "mfu": record["needed_flops"] / seconds / (ranks.count * self.product_flops),
            "peak_bytes": int(ranks.largest(peak_bytes(ranks.device))),
            "loss": float(record["loss"]),
            "grad_norm": float(record["grad_norm"]),
            "elapsed_s": time.perf_counter() - self._began,
            "train": figures(sums, self.trainer.options.step_decay),
        }

    def _write(self, record: dict[str, Any]) -> None:
        self.trainer.ranks.check()
        if not self.trainer.ranks.is_first:
            return
        append_record(self.folder / LOG_FILE, record)
        self.tell(record)

    def _is_time(self, every: int) -> bool:
        """The end of the run has its own look and checkpoint."""
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
