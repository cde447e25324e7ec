"""Checkpoints of a run: all that a resumed run needs, in safetensors and JSON, whole or not at all.

`checkpoints/NNNNNNNN/` holds `state.safetensors` (float32 masters and the optimiser's moments) and
`state.json` (the step). Data order, learning rate and TTT steps are functions of the step. What
ranks split is gathered, since a draft is small: any number of ranks goes on from it.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.artefact import mend_folders, replaced_folder, write_json
from paceline.errors import DiskFullError, TrainingError
from paceline.train.optimiser import MasterAdamW
from paceline.train.parallel import whole
from paceline.train.ranks import Ranks

FOLDER = "checkpoints"
_STATE, _STEP = "state.safetensors", "state.json"
_KEPT = 2


def save_checkpoint(run_folder: Path, next_step: int, optimiser: MasterAdamW, ranks: Ranks) -> None:
    """Write the state from which optimiser step `next_step` goes on; older ones but one go.

    All ranks enter, the first one writes. Raises DiskFullError; the checkpoints before are kept.
    """
    tensors = {}
    for name, tensor in optimiser.state_tensors().items():
        gathered = whole(tensor)
        if ranks.is_first:
            tensors[name] = gathered.cpu().contiguous()
    ranks.from_first(lambda: _write(run_folder, next_step, tensors))


def _write(run_folder: Path, next_step: int, tensors: dict[str, torch.Tensor]) -> None:
    tensors["torch_rng_state"] = torch.get_rng_state()
    with replaced_folder(run_folder / FOLDER / f"{next_step:08d}") as aside:
        try:
            save_file(tensors, aside / _STATE)
        except SafetensorError as error:
            # safetensors tells what the file system refused in words alone.
            raise DiskFullError(
                f"{aside}: the checkpoint cannot be written ({error}). Earlier ones are kept: make "
                "room and run the same command again."
            ) from error
        with (aside / _STATE).open("rb+") as file:
            os.fsync(file.fileno())
        write_json(aside / _STEP, {"next_step": next_step})
    for old in _finished(run_folder)[:-_KEPT]:
        shutil.rmtree(old)


def load_checkpoint(run_folder: Path, optimiser: MasterAdamW, ranks: Ranks) -> int:
    """Load the newest checkpoint into the optimiser. Returns the next step; 0 where there is none.

    All ranks enter. Raises TrainingError for a checkpoint that is incomplete: training never
    restarts in silence.
    """
    found = ranks.from_first(lambda: _finished(run_folder))
    if not found:
        return 0
    newest = found[-1]
    try:
        tensors = load_file(newest / _STATE)
        next_step = json.loads((newest / _STEP).read_text())["next_step"]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise TrainingError(
            f"{newest} cannot be read ({error}); remove it to go on from the one before"
        ) from error
    torch.set_rng_state(tensors.pop("torch_rng_state"))
    optimiser.load_state_tensors(tensors)
    return next_step


def _finished(run_folder: Path) -> list[Path]:
    mend_folders(run_folder / FOLDER)
    return sorted((run_folder / FOLDER).glob("[0-9]*"))
