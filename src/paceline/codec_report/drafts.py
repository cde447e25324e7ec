"""A draft for each codec, trained on its states and measured on the target's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.evaluate.run import run as evaluate
from paceline.recipe import CodecReportOptions, EvaluateOptions, TrainOptions
from paceline.train.run import run as train

_CHECKPOINT_EVERY = 25


@dataclass(frozen=True)
class DraftLab:
    """Trains and measures below a folder; what is finished there is not done again.

    stores: the folder of each codec's store, `raw` among them.
    """

    options: CodecReportOptions
    folder: Path
    stores: dict[str, Path]

    def acceptance(self, codec: str) -> dict[str, Any]:
        """Acceptance length for each K. trained: of a draft trained on the codec's states and
        measured on the target's own, as a server has them; read: of the draft that was trained on
        raw states and reads the codec's."""
        found = {"trained": self._measure(codec, "raw")}
        if codec != "raw":
            found["read"] = self._measure("raw", codec)
        return found

    def _measure(self, trained_on: str, reads: str) -> dict[str, Any]:
        options = self.options
        draft = self._train(trained_on)
        result = evaluate(
            EvaluateOptions(
                draft=str(draft),
                store=str(self.stores[reads]),
                out=str(self.folder / f"{trained_on}-draft-reads-{reads}"),
                num_draft_tokens=options.num_draft_tokens,
                baselines=False,
                dtype=options.dtype,
                device=options.device,
                **_target(options),
            )
        )
        names = ("acceptance_length", "interval", "conversations")
        return {
            k: {name: found["pooled"][name] for name in names}
            for k, found in result["results"].items()
        }

    def _train(self, codec: str) -> Path:
        options = self.options
        out = self.folder / f"{codec}-draft"
        train(
            TrainOptions(
                store=str(self.stores[codec]),
                vocab=options.vocab,
                out=str(out),
                ttt_steps=options.ttt_steps,
                max_steps=options.steps,
                batch_rows=options.batch_rows,
                learning_rate=options.learning_rate,
                warmup_steps=options.warmup_steps,
                seed=options.seed,
                dtype=options.dtype,
                device=options.device,
                checkpoint_every=_CHECKPOINT_EVERY,
                **_target(options),
            )
        )
        return out


def _target(options: CodecReportOptions) -> dict[str, Any]:
    return options.model_dump(include={"target", "revision", "trust_remote_code"})
