"""Where drafts fail, against counts made a token at a time."""

from collections import Counter

import numpy as np
import pytest
import torch

from paceline.acceptance.counts import Answer
from paceline.contracts import SampleRecord
from paceline.evaluate.failures import Failures
from paceline.store import StoredSample
from paceline.target.spec import Target, TargetReference
from tests.targets import save_target, save_tokenizer

V = 260


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return Target(TargetReference(str(save_target(folder, vocab_size=V))))


def _stored(name, ids, mask):
    mask = np.array(mask, bool)
    record = SampleRecord(name, "talk", "train", len(ids), 0, int(mask.sum()), 0, 0, 0, name)
    empty = torch.empty(0)
    return StoredSample(
        record, torch.tensor(ids, dtype=torch.int32), torch.tensor(mask), empty, empty
    )


def _answer(match):
    return Answer(np.array(match), np.full(len(match), 9))


def _entries(told, name):
    return {e["id"]: (e["right"], e["tries"]) for e in told[name]}


def test_every_point_counts_for_the_token_it_drafts_and_the_token_it_reads(target):
    """Two answers of one sample and one of another; points stand after each answer token but the
    last, and draft the token that follows."""
    generator = np.random.default_rng(0)
    tries, right = (
        {"token": Counter(), "after": Counter()},
        {"token": Counter(), "after": Counter()},
    )
    failures = Failures(V)
    for number in range(30):
        ids = generator.integers(10, 18, 40).tolist()
        mask = [False] * 5 + [True] * 10 + [False] * 3 + [True] * 22
        matches = [generator.integers(0, 3, 9), generator.integers(0, 3, 21)]
        failures.add(_stored(f"s{number}", ids, mask), [_answer(m) for m in matches])
        for first, match in zip((5, 18), matches):
            for i, accepted in enumerate(match):
                for name, token in (("after", ids[first + i]), ("token", ids[first + i + 1])):
                    tries[name][token] += 1
                    right[name][token] += accepted > 0
    told = failures.told(target, np.ones(V, bool))
    for name in ("token", "after"):
        expected = {t: (right[name][t], n) for t, n in tries[name].items()}
        assert _entries(told, {"token": "tokens"}.get(name, name)) == expected
    assert told["points"] == 30 * 30
    assert told["right"] == sum(right["token"].values())


def test_what_surely_fails_stands_before_what_was_seen_seldom(target):
    failures = Failures(V)
    # 20 fails 40 times of 40, 21 fails 5 of 5, 22 half the time, 23 was tried too seldom to tell,
    # 24 never fails.
    kinds = ((20, [0] * 40), (21, [0] * 5), (22, [0, 1] * 20), (23, [0] * 4), (24, [1] * 40))
    for token, matches in kinds:
        ids = [30, *[token] * (len(matches) + 1)]
        mask = [False, *[True] * (len(matches) + 1)]
        failures.add(_stored(f"t{token}", ids, mask), [_answer(matches)])
    t2d = np.ones(V, bool)
    t2d[20] = False
    told = failures.told(target, t2d)
    assert [e["id"] for e in told["tokens"]] == [20, 21, 22]
    assert [e["reachable"] for e in told["tokens"]] == [False, True, True]
    assert told["rejected_outside_vocabulary"] == pytest.approx(40 / (40 + 5 + 20 + 4))


def test_the_worst_passages_are_decoded_with_their_misses(target):
    failures = Failures(V)
    words = [4 + b for b in range(60)]
    for number, misses in enumerate((3, 20, 9, 24, 12, 15, 18, 1)):
        matches = [0] * misses + [1] * (24 - misses)
        failures.add(
            _stored(f"p{number}", words[:30], [False] * 5 + [True] * 25), [_answer(matches)]
        )
    passages = failures.told(target, np.ones(V, bool))["passages"]
    assert [p["sample_id"] for p in passages] == ["p3", "p1", "p6", "p5", "p4", "p2"]
    worst = passages[1]
    assert worst["share"] == pytest.approx(4 / 24)
    assert [p["right"] for p in worst["pieces"]] == [False] * 20 + [True] * 4
    assert [p["id"] for p in worst["pieces"]] == words[6:30]
    assert worst["pieces"][0]["text"] == target.tokenizer.decode([words[6]])
    assert worst["before"] == target.tokenizer.decode(words[:6])


def test_without_a_tokenizer_ids_are_told(tmp_path):
    folder = save_target(tmp_path / "t", vocab_size=V)
    for path in save_tokenizer(folder).glob("tokenizer*"):
        path.unlink()
    failures = Failures(V)
    failures.add(_stored("a", [5] * 10, [False] + [True] * 9), [_answer([0] * 8)])
    told = failures.told(Target(TargetReference(str(folder))), np.ones(V, bool))
    assert told["tokens"][0]["id"] == 5


def test_nothing_to_tell_is_no_crash(target):
    told = Failures(V).told(target, np.ones(V, bool))
    assert told["tokens"] == told["after"] == told["passages"] == []
    assert told["rejected_outside_vocabulary"] is None
