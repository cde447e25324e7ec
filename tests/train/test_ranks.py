"""Several ranks, as real processes: equal to one rank in every number, and ended by any failure."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.artefact import load_finished
from paceline.store import Store
from paceline.train.balance import divide
from paceline.train.ranks import Ranks
from paceline.vocab import load_vocabulary

from ..draft import oracle
from ..draft.tiny import shape_of, tiny_config, tiny_draft, weights_of
from ..lines import trained
from . import rank_work
from .launch import run_ranks
from .poison import poison, samples_of_steps

WAYS = ("ddp", "fsdp2")


def curve(folder):
    """Of every logged step what a run is compared by; the last word counts."""
    lines = [json.loads(text) for text in (folder / "log.jsonl").read_text().splitlines()]
    keys = ("loss", "grad_norm", "learning_rate", "rows", "tokens")
    found = {r["step"]: [*(r[k] for k in keys), *r["train"]["kl"]] for r in lines if "loss" in r}
    return [found[step] for step in sorted(found)]


def looks(folder):
    """What was seen of held-out data, by optimiser steps done."""
    lines = [json.loads(text) for text in (folder / "log.jsonl").read_text().splitlines()]
    return {r["step"]: r["heldout"] for r in lines if "heldout" in r}


def assert_close(given, expected, tolerance):
    """Of each tensor, relative to its norm."""
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (given[name].double() - tensor.double()).norm()
        assert float(error) <= tolerance * float(tensor.double().norm()), (name, float(error))


def test_gradients_of_ranks_are_those_of_one_rank_and_of_the_oracle(tmp_path):
    codes, texts = run_ranks(rank_work.steps, tmp_path / "ranks", str(tmp_path), "cpu")
    assert codes == [0, 0], texts
    alone = Ranks(torch.device("cpu"))
    one = rank_work.one_step(alone, "ddp", [list(range(len(rank_work.MASKS)))])
    draft = tiny_draft(tiny_config())
    weights, embedding = weights_of(draft), draft.embed_tokens.weight.detach()
    expected = oracle.loss(
        weights,
        shape_of(draft.config),
        rank_work.documents(),
        embedding,
        rank_work.teacher_logits,
        rank_work.NUM_STEPS,
        rank_work.DECAY,
    )
    expected.backward()
    # After one step without clipping the first moment is so much of the gradient.
    exact = {f"adamw.exp_avg.{n}": 0.1 * w.grad for n, w in weights.items() if w.grad is not None}
    for how in WAYS:
        for name in rank_work.SHARES:
            given = [load_file(tmp_path / f"{how} {name} {rank}") for rank in (0, 1)]
            assert all(torch.equal(given[0][key], given[1][key]) for key in given[0])
            assert_close(given[0], one, 1e-5)
            assert_close({key: given[0][key] for key in exact}, exact, 1e-5)
            torch.testing.assert_close(given[0]["loss"].double()[0], expected.detach())


@pytest.mark.parametrize("how", WAYS)
def test_T08_a_run_on_two_ranks_is_that_of_one_and_its_checkpoints_are_whole(line, tmp_path, how):
    options = {"parallel": how, "checkpoint_every": 3, "micro_batch_tokens": 40, "eval_every": 4}
    trained(line, str(tmp_path / "one"), **options)
    two = tmp_path / "two"
    # Rank 1 fails where it writes anything into the folder.
    codes, texts = run_ranks(rank_work.train, tmp_path / "ranks", str(line), str(two), {}, options)
    assert codes == [0, 0], texts
    assert len(curve(two)) == 8
    for one, other in zip(curve(tmp_path / "one"), curve(two), strict=True):
        assert other == pytest.approx(one, rel=1e-4)
    seen, other_seen = looks(tmp_path / "one"), looks(two)
    assert sorted(seen) == sorted(other_seen) == [4, 8]
    for step, figures in seen.items():
        assert other_seen[step]["acceptance"] == figures["acceptance"]
        assert other_seen[step]["loss"] == pytest.approx(figures["loss"], rel=1e-4)
    best = [load_finished(f / "best", "train").result for f in (tmp_path / "one", two)]
    assert best[0]["steps"] == best[1]["steps"] and best[1]["ranks"] == 2
    saved = load_file(two / "checkpoints" / "00000006" / "state.safetensors")
    masters = {key: value for key, value in saved.items() if key.startswith("master.")}
    for rank in (0, 1):
        held = load_file(tmp_path / f"two.masters{rank}.6")
        assert held.keys() == masters.keys()
        assert all(torch.equal(held[key], masters[key]) for key in held)
    draft, vocabulary = load_file(two / "draft.safetensors"), load_vocabulary(line / "vocab")
    assert torch.equal(draft["d2t"], torch.from_numpy(vocabulary.d2t))
    assert torch.equal(draft["t2d"], torch.from_numpy(vocabulary.t2d))
    assert_close(draft, load_file(tmp_path / "one" / "draft.safetensors"), 1e-3)


def test_a_killed_rank_ends_all_and_the_run_goes_on_on_two_ranks_or_on_one(line, tmp_path):
    options = {"parallel": "fsdp2"}
    whole, broken, moved = (tmp_path / name for name in ("whole", "broken", "moved"))
    run = lambda out, faults: run_ranks(
        rank_work.train, tmp_path / "ranks", str(line), str(out), faults, options
    )
    assert run(whole, {})[0] == [0, 0]
    codes, texts = run(broken, {"die_at": 5})
    assert codes == [1, -9]
    assert texts[0].startswith("RankError: rank 1 ended without a word")
    shutil.copytree(broken, moved)
    codes, texts = run(broken, {})
    assert codes == [0, 0], texts
    assert curve(broken) == curve(whole)
    first, second = (load_file(out / "draft.safetensors") for out in (whole, broken))
    assert all(torch.equal(first[key], second[key]) for key in first)
    trained(line, str(moved), parallel="ddp")
    for one, other in zip(curve(whole), curve(moved), strict=True):
        assert other == pytest.approx(one, rel=1e-4)


def test_a_step_that_is_not_finite_on_one_rank_is_kept_with_what_all_ranks_had(line, tmp_path):
    shutil.copytree(line, tmp_path / "line")
    store = Store(tmp_path / "line" / "store")
    samples = samples_of_steps(store, max_steps=8)[2]
    bad, _ = poison(store, samples[0])
    run = tmp_path / "run"
    arguments = str(tmp_path / "line"), str(run), {}, {"parallel": "fsdp2"}
    codes, texts = run_ranks(rank_work.train, tmp_path / "ranks", *arguments)
    assert codes == [1, 1]
    assert "optimiser step 2: gradient norm is nan, loss is nan: no weight was moved" in texts[0]
    found = paceline.replay(str(run / "nan_batch"), device="cpu")
    assert (found["step"], found["loss"]) == (2, "nan")
    losses = {s["sample_id"]: s["loss"] for s in found["samples"]}
    assert sorted(losses) == sorted(store.records[i].sample_id for i in samples)
    assert losses.pop(bad) == "nan" and all(isinstance(loss, float) for loss in losses.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_T08_a_rank_that_fails_in_save_ends_all_with_its_text(line, tmp_path, rank):
    arguments = str(line), str(tmp_path / "run"), {"fail_in_save": rank}, {"parallel": "fsdp2"}
    codes, texts = run_ranks(rank_work.train, tmp_path / "ranks", *arguments)
    assert codes == [1, 1]
    assert texts[1 - rank] == f"RankError: rank {rank} failed: RuntimeError: the disk fell off"
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


def test_torchrun_starts_the_program_and_one_rank_speaks(line, tmp_path):
    options = {
        "store": line / "store",
        "vocab": line / "vocab",
        "out": tmp_path / "run",
        "max-steps": 2,
        "batch-rows": 60,
        "dtype": "float32",
        "parallel": "fsdp2",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *ranks, "-m", "paceline", "train", *given, "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2
    assert done.stderr.count("2 ranks (fsdp2)") == 1


def test_costs_are_divided_evenly_and_completely():
    generator = torch.Generator().manual_seed(0)
    for num_parts in (1, 2, 3, 8):
        costs = torch.randint(1, 4096, (100,), generator=generator).tolist()
        parts = divide(costs, num_parts)
        assert sorted(i for part in parts for i in part) == list(range(100))
        sums = [sum(costs[i] for i in part) for part in parts]
        assert max(sums) - min(sums) <= max(costs)
        assert max(sums) < 1.02 * sum(costs) / num_parts
    assert divide([5], 3) == [[0], [], []]
