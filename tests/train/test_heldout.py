"""Held-out figures while training: the acceptance length is that of a walk token by token, the best
draft is kept, and a broken run and an unbroken one agree on which it was."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.artefact import load_finished
from paceline.contracts import LOCK_NAME
from paceline.draft.checkpoint import load_draft
from paceline.draft.unroll import Unroll
from paceline.errors import TrainingError, UsageError
from paceline.store import Store
from paceline.target.spec import open_target
from paceline.train import loop, session
from paceline.train.best import BestDraft

from ..lines import extracted, trained

K = 3


class Stopped(BaseException):
    """As a signal would."""


def train(run, out, **options):
    return paceline.train(
        **{
            "store": str(run / "extract"),
            "vocab": str(run / "align"),
            "out": str(out),
            "dtype": "float32",
            "max_steps": 12,
            "batch_rows": 64,
            "warmup_steps": 1,
            "learning_rate": 2e-2,
            "log_every": 4,
            "checkpoint_every": 5,
            "eval_every": 3,
            "eval_draft_tokens": K,
            **options,
        }
    )


def looks(out):
    records = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return {r["step"]: r["heldout"] for r in records if "heldout" in r}


@torch.inference_mode()
def chain(draft, sample, point):
    """K draft tokens after token `point`, from one row at a time."""
    ids, row = sample.input_ids.long(), point - 1
    positions = torch.arange(row + 1)
    unroll = Unroll(
        draft, sample.aux[: row + 1], ids[1 : row + 2], positions, torch.zeros_like(positions)
    )
    state, tokens = unroll.first(torch.tensor([row])), []
    for _ in range(K):
        tokens.append(draft.propose(state))
        state = unroll.next(tokens[-1])
    return [int(token) for token in tokens]


def walked(draft, sample):
    """(verify steps, accepted) of a sample with one answer, its tokens past the end on record."""
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
    point, end = mask.index(True), len(mask) - 1 - mask[::-1].index(True)
    steps = accepted = 0
    while point < end:
        drafted = chain(draft, sample, point)
        right = 0
        while right < K and ids[point + 1 + right : point + 2 + right] == [drafted[right]]:
            right += 1
        if point + K < len(ids):
            steps, accepted = steps + 1, accepted + right
        point += right + 1
    return steps, accepted


def test_the_acceptance_length_is_that_of_a_walk_token_by_token(tiny_run, tmp_path):
    out = tmp_path / "draft"
    result = train(tiny_run, out, eval_every=None, eval_samples=None)
    target = open_target(paceline.recipe.TrainOptions(), result["target"])
    draft, store = load_draft(out, target), Store(tiny_run / "extract")
    walks = [walked(draft, store.read(int(i))) for i in store.split("heldout")]
    steps, accepted = (sum(column) for column in zip(*walks))
    told = result["heldout"]["acceptance"]
    assert (told["verify_steps"], told["accepted"]) == (steps, accepted)
    assert told["acceptance_length"] == 1 + accepted / steps > 1
    assert told["conversations"] == len(walks)
    assert looks(out) == {12: result["heldout"]}
    assert result["best"] is None and not (out / "best").exists()


def test_the_best_draft_is_kept_and_can_be_the_result(tiny_run, tmp_path):
    last, best = tmp_path / "last", tmp_path / "best"
    common = {"eval_samples": None, "schedule": "constant", "learning_rate": 0.1}
    result = train(tiny_run, last, **common)
    lengths = {step: seen["acceptance"]["acceptance_length"] for step, seen in looks(last).items()}
    assert sorted(lengths) == [3, 6, 9, 12]
    top = max(lengths, key=lengths.get)
    assert top != 12, "the draft must get worse again for this test to say something"
    assert (result["best"]["step"], result["draft_step"], result["steps"]) == (top, 12, 12)
    assert result["heldout"] == looks(last)[12]
    # What is kept is a folder like any other, and `evaluate` finds the same of it.
    kept = load_finished(last / "best", "train").result
    assert kept["steps"] == top and kept["heldout"] == looks(last)[top]
    found = paceline.evaluate(
        draft=str(last / "best"),
        store=str(tiny_run / "extract"),
        out=str(tmp_path / "evaluate"),
        num_draft_tokens=[K],
        baselines=False,
        dtype="float32",
    )
    assert found["results"][str(K)]["pooled"]["acceptance_length"] == lengths[top]

    chosen = train(tiny_run, best, load_best_model_at_end=True, **common)
    assert (chosen["draft_step"], chosen["steps"]) == (top, 12)
    assert chosen["heldout"] == kept["heldout"]
    a, b, c = (load_file(f / "draft.safetensors") for f in (best, best / "best", last / "best"))
    assert all(torch.equal(a[name], b[name]) and torch.equal(a[name], c[name]) for name in a)


def test_a_broken_run_keeps_what_was_best(tiny_run, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    common = {"load_best_model_at_end": True, "eval_samples": 3}
    result = train(tiny_run, whole, **common)
    whole_step = loop.Trainer.step

    for fatal in (4, 8, 11):

        def stopping_step(self, read, fatal=fatal):
            if read.step.number == fatal:
                raise Stopped
            return whole_step(self, read)

        with monkeypatch.context() as patch:
            patch.setattr(loop.Trainer, "step", stopping_step)
            with pytest.raises(Stopped):
                train(tiny_run, broken, **common)
        if fatal == 8:
            # A kill between the renames that put a better draft in the place of the one before.
            os.replace(broken / "best", broken / ".best-before.tmp")
    again = train(tiny_run, broken, **common)
    assert again["best"] == result["best"] and again["draft_step"] == result["draft_step"]
    assert again["heldout"] == result["heldout"]
    one, other = (load_file(out / "draft.safetensors") for out in (whole, broken))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_only_a_better_draft_takes_the_place(tiny_run, tmp_path):
    out = tmp_path / "draft"
    train(tiny_run, out)
    best = BestDraft(out, None, {})
    known = best.result()["heldout"]["acceptance"]
    for length, is_better in ((None, False), (known["acceptance_length"], False), (9.0, True)):
        assert best.is_better({"acceptance": {**known, "acceptance_length": length}}) == is_better


@pytest.mark.parametrize("changed", ["num_draft_tokens", "conversations"])
def test_lengths_of_other_chains_or_chats_are_not_compared(tiny_run, tmp_path, caplog, changed):
    out = tmp_path / "draft"
    train(tiny_run, out)
    best = BestDraft(out, None, {})
    known = best.result()["heldout"]["acceptance"]
    lower = {**known, "acceptance_length": 1.0, changed: known[changed] - 1}
    assert best.is_better({"acceptance": lower})
    assert "measured otherwise" in caplog.text


def test_a_last_look_that_fails_costs_no_step(tiny_run, tmp_path, monkeypatch):
    out, made = tmp_path / "draft", []
    whole_step = loop.Trainer.step
    counted = lambda self, read: made.append(read.step.number) or whole_step(self, read)
    monkeypatch.setattr(loop.Trainer, "step", counted)
    with monkeypatch.context() as patch:
        patch.setattr(session, "heldout_figures", failing)
        with pytest.raises(Stopped):
            train(tiny_run, out, eval_every=None)
    assert train(tiny_run, out, eval_every=None)["heldout"]["rows"][0] > 0
    assert made == list(range(12))


def failing(*_):
    raise Stopped


def test_samples_are_few_spread_and_stay_the_same(tiny_run, tmp_path):
    out = tmp_path / "draft"
    result = train(tiny_run, out, eval_samples=3)
    store = Store(tiny_run / "extract")
    known = store.split("heldout").tolist()
    chosen = json.loads((out / "heldout.json").read_text())["samples"]
    assert len(chosen) == 3 < len(known)
    assert [known.index(i) for i in chosen] == [i * len(known) // 3 for i in range(3)]
    assert result["heldout"]["rows"][0] == sum(map(store.num_taught_rows, chosen))
    assert {look["rows"][0] for look in looks(out).values()} == {result["heldout"]["rows"][0]}


def test_the_best_draft_needs_held_out_data(tmp_path):
    extracted(tmp_path, heldout_share=0.0)
    assert trained(tmp_path, "last", max_steps=2, eval_every=1)["heldout"] is None
    with pytest.raises(TrainingError, match="holds no held-out sample"):
        trained(tmp_path, max_steps=2, eval_every=1, load_best_model_at_end=True)
    assert_nothing_was_begun(tmp_path / "draft")


def test_the_best_draft_needs_an_acceptance_length(tmp_path):
    extracted(tmp_path)
    options = {"max_steps": 4, "eval_every": 2, "eval_draft_tokens": 100}
    assert trained(tmp_path, "last", **options)["best"] is None
    with pytest.raises(TrainingError, match=r"eval_draft_tokens \(100\) tokens on record"):
        trained(tmp_path, load_best_model_at_end=True, **options)
    assert_nothing_was_begun(tmp_path / "draft")


def assert_nothing_was_begun(folder):
    """No step was made for nothing, and the folder takes a training of other options."""
    assert [path.name for path in folder.iterdir()] == [LOCK_NAME]


def test_the_best_draft_needs_looks():
    with pytest.raises(UsageError, match="load_best_model_at_end: set eval_every"):
        paceline.train(store="s", vocab="v", out="o", load_best_model_at_end=True)
