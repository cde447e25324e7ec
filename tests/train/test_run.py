"""The stage: a broken run and an unbroken one end with the same weights, bad inputs are refused."""

import json
import logging
import math
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

import paceline
from paceline.errors import FingerprintMismatch, TrainingError, UsageError
from paceline.runlog import read_log
from paceline.train import loop

from ..lines import trained
from ..targets import save_target


def records(folder):
    lines = [json.loads(text) for text in (folder / "log.jsonl").read_text().splitlines()]
    return {
        r["step"]: (r["loss"], r["learning_rate"], r["grad_norm"]) for r in lines if "loss" in r
    }


class Stopped(BaseException):
    """As a signal would: nothing in the loop may catch it."""


def train_until(monkeypatch, line, out, step, **options):
    whole_step = loop.Trainer.step

    def stopping_step(self, read):
        if read.step.number == step:
            raise Stopped
        return whole_step(self, read)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stopping_step)
        with pytest.raises(Stopped):
            trained(line, out, **options)


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"schedule": "linear"}, {"state_noise": 0.2}], ids=str
)
def test_T04_a_broken_run_ends_with_the_same_weights_and_curve(
    line, monkeypatch, tmp_path, options
):
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    trained(line, whole, **options)
    for step in (3, 7):
        train_until(monkeypatch, line, broken, step, **options)
    trained(line, broken, **options)
    weights = [load_file(f"{out}/draft.safetensors") for out in (whole, broken)]
    assert weights[0].keys() == weights[1].keys()
    assert all(bool((weights[0][n] == weights[1][n]).all()) for n in weights[0])
    assert records(tmp_path / "whole") == records(tmp_path / "broken")


def test_T04_a_checkpoint_that_lacks_state_is_an_error(line, monkeypatch, tmp_path):
    train_until(monkeypatch, line, str(tmp_path / "run"), 5)
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    tensors = load_file(newest / "state.safetensors")
    del tensors["adamw.exp_avg.fc.weight"]
    save_file(tensors, newest / "state.safetensors")
    with pytest.raises(TrainingError, match=r"lacks adamw.exp_avg.fc.weight"):
        trained(line, str(tmp_path / "run"))
    (newest / "state.safetensors").write_bytes(b"cut off")
    with pytest.raises(TrainingError, match="cannot be read"):
        trained(line, str(tmp_path / "run"))


def test_a_checkpoint_that_was_being_replaced_is_found_again(line, monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    train_until(monkeypatch, line, str(tmp_path / "run"), 5)
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    # A kill between two renames.
    newest.rename(newest.with_name(f".{newest.name}-before.tmp"))
    caplog.clear()
    trained(line, str(tmp_path / "run"))
    assert f"(from step {int(newest.name)})" in caplog.text


def test_accumulation_does_not_change_the_steps(line, tmp_path):
    curves = []
    for name, tokens in (("one", 100_000), ("many", 40)):
        trained(line, str(tmp_path / name), micro_batch_tokens=tokens)
        curves.append(records(tmp_path / name))
    for step, values in curves[0].items():
        assert values == pytest.approx(curves[1][step], rel=1e-4), step


def test_training_lowers_the_loss_and_a_finished_run_is_not_repeated(line, tmp_path):
    first = trained(line, str(tmp_path / "run"), max_steps=40)
    curve = records(tmp_path / "run")
    assert curve[39][0] < 0.8 * curve[0][0]
    assert first["heldout"]["rows"][0] > 0
    before = (tmp_path / "run" / "draft.safetensors").stat().st_mtime_ns
    assert trained(line, str(tmp_path / "run"), max_steps=40) == first
    assert (tmp_path / "run" / "draft.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("length", [{"max_steps": None, "epochs": 0.5}, {"max_steps": 40}], ids=str)
def test_answers_longer_than_a_step_end_no_run_early(line, tmp_path, caplog, length):
    caplog.set_level(logging.INFO)
    trained(line, str(tmp_path / "run"), batch_rows=5, min_lr_ratio=0.0, log_every=1, **length)
    seen = records(tmp_path / "run")
    planned = int(re.search(r"train: (\d+) optimiser steps", caplog.text)[1])
    assert sorted(seen) == list(range(planned))
    assert planned == length["max_steps"] or length["max_steps"] is None
    # A cosine to zero, warm-up apart: it is at its end.
    assert seen[planned - 1][1] == pytest.approx(
        2e-3 * (math.pi / 2 / (planned - 2)) ** 2, rel=0.05
    )
    assert "ended after" not in caplog.text


@pytest.mark.parametrize(("warmup_steps", "is_told"), [(8, True), (7, False), (0.9, False)])
def test_a_warm_up_that_lasts_to_the_end_is_told(line, tmp_path, caplog, warmup_steps, is_told):
    trained(line, str(tmp_path / "run"), max_steps=8, warmup_steps=warmup_steps)
    assert ("the learning rate never reaches 0.002" in caplog.text) == is_told


def test_other_options_for_a_finished_folder_are_refused_by_name(line, tmp_path):
    trained(line, str(tmp_path / "run"))
    with pytest.raises(FingerprintMismatch, match=r"learning_rate: was 0.002, now 0.01"):
        trained(line, str(tmp_path / "run"), learning_rate=0.01)


def test_a_store_of_another_target_is_refused_by_what_differs(line, tmp_path):
    other = save_target(tmp_path / "other", seed=5)
    with pytest.raises(FingerprintMismatch, match="weights"):
        trained(line, str(tmp_path / "run"), target=str(other))
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_of_another_width_is_refused(line, tmp_path):
    other = tmp_path / "wide"
    save_target(other / "target", vocab_size=330)
    shutil.copy(line / "rows.jsonl", tmp_path / "rows.jsonl")
    paceline.prepare(
        target=str(other / "target"), data=[str(tmp_path / "rows.jsonl")], out=str(other / "data")
    )
    paceline.align(data=str(other / "data"), out=str(other / "vocab"), draft_vocab_size=64)
    with pytest.raises(FingerprintMismatch, match="logit width of 330"):
        trained(line, str(tmp_path / "run"), vocab=str(other / "vocab"))


def test_a_vocabulary_of_another_tokenizer_is_refused(line, tmp_path):
    other = tmp_path / "target"
    shutil.copytree(line / "target", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[-2:]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows, data, vocab = (tmp_path / name for name in ("rows.jsonl", "data", "vocab"))
    shutil.copy(line / "rows.jsonl", rows)
    paceline.prepare(target=str(other), data=[str(rows)], out=str(data))
    paceline.align(data=str(data), out=str(vocab), draft_vocab_size=64)
    with pytest.raises(FingerprintMismatch, match="holds token ids of another target: tokenizer"):
        trained(line, str(tmp_path / "run"), vocab=str(vocab))


def test_a_run_goes_on_behind_a_torn_line_of_its_log(line, monkeypatch, tmp_path):
    out = tmp_path / "run"
    train_until(monkeypatch, line, str(out), 5)
    with (out / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "lo')
    trained(line, str(out))
    assert [record["step"] for record in read_log(out).train] == list(range(8))


def test_missing_options_are_named():
    with pytest.raises(UsageError, match="`store`"):
        paceline.train(out="x")


@pytest.mark.parametrize(
    "options",
    [
        {"draft": {"num_layers": 2}},
        {"draft": {"aux_norm": "static"}},
        {"draft": {"qk_norm": True, "norm_output": True}},
        {"draft": {"init": "random", "intermediate_size": 20}},
        {"ttt_warmup": 0.5},
        {"loss": "hybrid", "optimiser": "muon"},
    ],
    ids=str,
)
def test_every_shape_of_draft_trains(line, tmp_path, options):
    result = trained(line, str(tmp_path / "run"), max_steps=3, **options)
    assert result["steps"] == 3
