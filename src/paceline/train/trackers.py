"""Where records go besides `log.jsonl`: TensorBoard, Weights & Biases, trackio.

Each is an extra, imported only when asked for. Figures are named by their place in the record:
`train/kl/0` is the KL of TTT step 0. They stand at the number of optimiser steps that were done, so
that a look at held-out data stands with the step before it.
"""

import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

PROJECT = "paceline"
Tell = Callable[[dict[str, float], int], None]  # figures by name, optimiser steps done


def check_installed(names: Sequence[str]) -> None:
    """Raises UsageError for trackers that are not."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"train: {', '.join(missing)} is not installed: pip install "
            f"'paceline[{','.join(missing)}]'"
        )


@contextmanager
def open_trackers(
    names: Sequence[str], folder: Path, config: dict[str, Any], start: int
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives what passes a log record on to all trackers. folder: that of the run; start: the
    optimiser step that it goes on from.
    """
    with ExitStack() as stack:
        tells = [stack.enter_context(_TRACKERS[name](folder, config, start)) for name in names]

        def tell(record: dict[str, Any]) -> None:
            shown = figures_of({k: v for k, v in record.items() if k != "step"})
            done = record["step"] + ("heldout" not in record)
            for each in tells:
                each(shown, done)

        yield tell


def figures_of(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record by their places; None (no such rows) is left out.

    >>> figures_of({"loss": 2.0, "train": {"kl": [1.5, None]}})
    {'loss': 2.0, 'train/kl/0': 1.5}
    """
    shown: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, dict):
            shown |= figures_of(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            shown[prefix + name] = float(value)
    return shown


@contextmanager
def _tensorboard(folder: Path, config: dict[str, Any], start: int) -> Iterator[Tell]:
    from torch.utils.tensorboard import SummaryWriter

    # What a broken run logged past its checkpoint is hidden: those steps are made again.
    with SummaryWriter(folder / "tensorboard", purge_step=start + 1) as writer:

        def tell(shown: dict[str, float], step: int) -> None:
            for name, value in shown.items():
                writer.add_scalar(name, value, step)

        yield tell


@contextmanager
def _wandb(folder: Path, config: dict[str, Any], start: int) -> Iterator[Tell]:
    import wandb

    # One run for all attempts: the id is kept in the run's folder.
    with wandb.init(
        project=None if "WANDB_PROJECT" in os.environ else PROJECT,
        id=_run_id(folder),
        name=folder.parent.name,
        dir=folder,
        config=config,
        resume="allow",
    ) as run:
        yield lambda shown, step: run.log(shown, step=step)


@contextmanager
def _trackio(folder: Path, config: dict[str, Any], start: int) -> Iterator[Tell]:
    import trackio

    # It prints, and stdout is the result's (`--json`).
    with redirect_stdout(sys.stderr):
        run = trackio.init(project=PROJECT, name=_run_id(folder), config=config, resume="allow")
    try:
        yield lambda shown, step: run.log(shown, step=step)
    finally:
        with redirect_stdout(sys.stderr):
            run.finish()


def _run_id(folder: Path) -> str:
    """The same for all attempts of a run, another for a folder that was made anew."""
    path = folder / "tracker_id"
    if not path.is_file():
        path.write_text(uuid.uuid4().hex)
    return path.read_text()


_TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
