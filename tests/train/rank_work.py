"""What the ranks of tests/train/test_ranks.py do, in processes of their own."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.draft.batch import PackedBatch, from_packed, pack
from paceline.draft.losses import Teacher
from paceline.recipe import TrainOptions
from paceline.train import checkpoint, session
from paceline.train.loop import Trainer
from paceline.train.optimiser import MasterAdamW
from paceline.train.parallel import share_draft, whole
from paceline.train.ranks import Ranks, open_ranks

from ..draft.oracle import Doc
from ..draft.tiny import random_doc, stored, tiny_config, tiny_draft
from ..lines import trained
from .launch import die
from .pairs import train_on_stream

MASKS = [[0, 1, 1, 1, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1, 0, 1], [0, 1, 0, 0, 1, 1, 1, 1], [0, 1]]
NUM_STEPS, DECAY = 3, 0.8
# Micro-batches of documents, by rank.
SHARES = {
    "even": [[[0, 1]], [[2, 3, 4]]],
    "accumulated": [[[0], [1], [2]], [[3, 4]]],
    "idle rank": [[[0, 1, 2, 3, 4]], [[]]],
}


def documents() -> list[Doc]:
    return [random_doc(tiny_config(), mask, i) for i, mask in enumerate(MASKS)]


def batch_of(group: list[int], docs: list[Doc]) -> PackedBatch:
    if group:
        return pack([stored(docs[i]) for i in group])
    # As the reader gives a group without samples.
    return from_packed(
        SimpleNamespace(
            input_ids=torch.empty(0, dtype=torch.int32),
            loss_mask=torch.empty(0, dtype=torch.bool),
            aux=torch.empty(0, 3, 16),
            last=torch.empty(0, 16),
            token_starts=[0],
            aux_starts=[0],
        )
    )


def teacher_logits(last: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    head = torch.randn(12, 16, dtype=torch.float64, generator=generator)
    return last @ head.to(last).T


def one_step(ranks: Ranks, how: str, groups: list[list[int]]) -> dict[str, torch.Tensor]:
    """The optimiser's whole state, its gradient norm and the loss after one step, `groups` being
    this rank's micro-batches."""
    draft = tiny_draft(tiny_config()).float()
    draft.rotary.inv_freq = draft.rotary.inv_freq.float()
    draft.to(ranks.device)
    parallel = share_draft(draft, ranks, how, "adamw")
    optimiser = MasterAdamW(draft, TrainOptions(max_grad_norm=1e9), parallel)
    docs, total = documents(), torch.zeros(1, device=ranks.device)
    num_rows = batch_of(list(range(len(docs))), docs).num_supervised_rows
    for number, group in enumerate(groups):
        batch = batch_of(group, docs).to(ranks.device, torch.float32)
        arguments = Teacher(teacher_logits), NUM_STEPS, DECAY, num_rows, 4
        loss, _ = parallel.distil(draft, batch, *arguments)
        parallel.backward(loss, number + 1 == len(groups))
        optimiser.accumulate()
        total += loss.detach()
    norm = optimiser.step(0.01)
    state = {n: whole(t).contiguous() for n, t in optimiser.state_tensors().items()}
    found = {**state, "norm": norm, "loss": ranks.sum(total)}
    return {name: tensor.cpu() for name, tensor in found.items()}


def steps(rank: int, folder: str, device: str) -> None:
    """`one_step` of all shares and ways, into files of every rank."""
    with open_ranks(device) as ranks:
        for how in ("ddp", "fsdp2"):
            for name, shares in SHARES.items():
                found = one_step(ranks, how, shares[rank])
                save_file(found, Path(folder) / f"{how} {name} {rank}")
        assert _threads_of_gloo()
    # One that outlives the group may end the process with an abort.
    assert not _threads_of_gloo()


def train(rank: int, line: str, out: str, faults: dict[str, int], options: dict) -> None:
    """The stage. faults: `die_at` {step}, on rank 1; `fail_in_save`: the rank that fails there."""
    folder = Path(out)
    if rank == 1:
        _watch_writes(folder)
        if "die_at" in faults:
            _before(Trainer, "step", faults["die_at"], die)
    if faults.get("fail_in_save") == rank:
        if rank == 0:
            checkpoint.save_file = _refuse
        else:
            checkpoint.whole = _refuse
    _keep_masters(folder, rank)
    trained(Path(line), out, **options)
    assert not _threads_of_gloo()


def follow(rank: int, folder: str, store: str, out: str) -> None:
    """The stage on a store that is being written."""
    train_on_stream(Path(folder), store, out, None, {"parallel": "fsdp2"})


def _threads_of_gloo() -> list[str]:
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


def _refuse(*_: Any) -> None:
    raise RuntimeError("the disk fell off")


def _before(owner: type, name: str, fatal: int, do: Callable[[], None]) -> None:
    real, count = getattr(owner, name), 0

    def counting(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        if count == fatal:
            do()
        count += 1
        return real(*arguments, **named)

    setattr(owner, name, counting)


def _keep_masters(folder: Path, rank: int) -> None:
    """The masters as each rank has them when a checkpoint is written, beside the run's folder."""
    real = session.save_checkpoint

    def keeping(run_folder: Path, next_step: int, optimiser: MasterAdamW, ranks: Any) -> None:
        real(run_folder, next_step, optimiser, ranks)
        masters = {f"master.{n}": whole(m).detach() for n, m in optimiser.masters.items()}
        path = folder.parent / f"{folder.name}.masters{rank}.{next_step}"
        save_file({n: t.contiguous() for n, t in masters.items()}, path)

    session.save_checkpoint = keeping


def _watch_writes(folder: Path) -> None:
    """This process may not write, make or move anything inside the folder."""
    inside = f"{folder}/"

    def refuse(event: str, arguments: tuple) -> None:
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            return
        path, mode = str(arguments[0]), arguments[1] if event == "open" else None
        reads = event == "open" and (mode is None or not set(str(mode)) & set("wax+"))
        if path.startswith(inside) and not reads:
            raise AssertionError(f"rank 1: {event} {arguments}")

    sys.addaudithook(refuse)
