"""Files as other tools write them, made here with torch and safetensors alone, from the states that
transformers itself reports."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.targets import save_target

NUM_LAYERS = 8
AUX = [2, 4, 6]


@dataclass(frozen=True)
class Told:
    """One sample: ids and mask [T]; hidden[k] [T, D] for k = 0 .. n, the last one pre-norm; normed
    [T, D], after the final norm."""

    ids: torch.Tensor
    mask: torch.Tensor
    hidden: list[torch.Tensor]
    normed: torch.Tensor


def save_small_target(folder: Path) -> Path:
    return save_target(folder, num_hidden_layers=NUM_LAYERS, vocab_size=260)


def tell(target: Path, count: int, dtype: torch.dtype = torch.float32) -> list[Told]:
    """States of random samples; the last sample is supervised up to its very end."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    rng = np.random.default_rng(5)
    told = []
    for number in range(count):
        length = int(rng.integers(6, 24))
        ids = torch.from_numpy(rng.integers(4, 260, length))
        mask = torch.zeros(length, dtype=torch.long)
        start, stop = 2 + number % 3, length if number == count - 1 else length - 1 - number % 2
        mask[start:stop] = 1
        with torch.inference_mode():
            output = model(ids[None], output_hidden_states=True)
        states = [h[0].to(dtype) for h in output.hidden_states]
        told.append(
            Told(ids, mask, [*states[:-1], seen.pop().to(dtype)], output.hidden_states[-1][0])
        )
    return told


def eagle(sample: Told, last_norm: str = "pre", aux: list[int] = AUX) -> dict:
    """What EAGLE and SpecForge keep: auxiliary states side by side, the last state apart."""
    return {
        "input_ids": sample.ids,
        "loss_mask": sample.mask,
        "hidden_state": (sample.normed if last_norm == "post" else sample.hidden[-1])[None],
        "aux_hidden_state": torch.cat([sample.hidden[k] for k in aux], -1)[None],
        "target": None,
    }


def listed(sample: Told, layers: list[int]) -> dict:
    """What speculators 0.3 keeps."""
    return {
        "input_ids": sample.ids,
        "hidden_states": [sample.hidden[k] for k in layers],
        "loss_mask": sample.mask,
    }


def write_torch(path: Path, values: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(values, path)
    return path


def write_joined(path: Path, sample: Told, layers: list[int]) -> Path:
    """What speculators 0.9 keeps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    states = torch.stack([sample.hidden[k] for k in layers], 1)
    save_file({"hidden_states": states, "token_ids": sample.ids}, path)
    return path


def write_rows(path: Path, samples: list[Told]) -> Path:
    """The same ids and masks as data for `prepare`."""
    rows = [
        {"id": f"row-{i}", "input_ids": s.ids.tolist(), "loss_mask": s.mask.tolist()}
        for i, s in enumerate(samples)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_kept(stored, sample: Told, aux: list[int] = AUX, normed: bool = False) -> None:
    """The bits of the file, and no row that a draft step does not read."""
    supervised = torch.nonzero(sample.mask).squeeze(1)
    rows = int(supervised[-1])
    assert stored.input_ids.tolist() == sample.ids.tolist()
    assert stored.loss_mask.tolist() == sample.mask.bool().tolist()
    assert stored.aux.shape[0] == stored.record.num_aux_rows == rows
    for column, k in enumerate(aux):
        assert torch.equal(stored.aux[:, column], sample.hidden[k][:rows])
    last = sample.normed if normed else sample.hidden[-1]
    assert torch.equal(stored.last, last[supervised])
