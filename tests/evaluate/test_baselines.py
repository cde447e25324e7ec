"""Bigram table and prompt lookup against the obvious slow way."""

import tracemalloc
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.acceptance.spans import answer_spans
from paceline.evaluate.baselines import BigramTable, prompt_lookup_answer
from paceline.store import Store

tokens = st.lists(st.integers(0, 4), min_size=4, max_size=25)
LONGEST = 4


def span_of(ids):
    mask = np.zeros(len(ids), bool)
    mask[2:] = True
    return answer_spans(mask, 0)[0]


def leading(proposed, actual):
    return next(
        (i for i, (a, b) in enumerate(zip(proposed, actual)) if a != b),
        min(len(proposed), len(actual)),
    )


def slow_lookup(ids, point):
    for n in (3, 2, 1):
        wanted = ids[point + 1 - n : point + 1]
        if len(wanted) < n:
            continue
        for end in range(point - 1, n - 2, -1):
            if ids[end + 1 - n : end + 1] == wanted:
                return ids[end + 1 : point + 1][:LONGEST]
    return []


@settings(deadline=None)
@given(tokens)
def test_prompt_lookup_equals_a_search_from_the_latest_to_the_first(ids):
    span = span_of(ids)
    answer = prompt_lookup_answer(np.array(ids), span, LONGEST)
    expected = [
        leading(slow_lookup(ids, p), ids[p + 1 : p + 1 + LONGEST])
        for p in range(span.first, span.end)
    ]
    assert answer.match.tolist() == expected
    assert answer.known.tolist() == [span.end - p for p in range(span.first, span.end)]


@settings(deadline=None)
@given(st.lists(tokens, min_size=1, max_size=4), tokens)
def test_the_bigram_table_holds_the_most_frequent_supervised_successor(training, ids):
    generator = np.random.default_rng(0)
    masks = [generator.random(len(t)) < 0.7 for t in training]
    counts = Counter(
        (a, b)
        for t, mask in zip(training, masks, strict=True)
        for a, b, supervised in zip(t, t[1:], mask[1:])
        if supervised
    )
    best = {}
    for (a, b), n in sorted(counts.items()):
        if a not in best or n > counts[a, best[a]]:
            best[a] = b
    pairs = [(np.array(t, np.int32), m) for t, m in zip(training, masks, strict=True)]
    table = BigramTable(pairs, vocab_size=5)
    span = span_of(ids)
    expected = []
    for p in range(span.first, span.end):
        chain, at = [], ids[p]
        while len(chain) < LONGEST and at in best:
            at = best[at]
            chain.append(at)
        expected.append(leading(chain, ids[p + 1 :]))
    assert table.answer(np.array(ids), span, LONGEST).match.tolist() == expected


def test_pairs_are_counted_on_the_way(monkeypatch):
    """A store of a million samples has several gigabytes of them."""
    ids, mask = np.arange(2000, dtype=np.int32) ** 2 % 40, np.ones(2000, bool)
    samples = [(np.roll(ids, number), mask) for number in range(400)]
    whole = BigramTable(samples, vocab_size=50).successor
    monkeypatch.setattr("paceline.evaluate.baselines._FEWEST_TO_MERGE", 10_000, raising=False)
    tracemalloc.start()
    try:
        table = BigramTable(samples, vocab_size=50)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert table.successor.tolist() == whole.tolist()
    # All pairs are 6.4 MB.
    assert peak < 2e6


def test_the_baselines_cost_no_states(tiny_run, tmp_path, monkeypatch):
    """With them and without, the same samples are read whole: those that the draft is run on."""
    read, seen = Store.read, []
    monkeypatch.setattr(Store, "read", lambda self, i: seen.append(i) or read(self, i))
    options = {"draft": str(tiny_run / "train"), "store": str(tiny_run / "extract")}
    counted = []
    for baselines in (False, True):
        seen.clear()
        found = paceline.evaluate(
            **options, out=str(tmp_path / str(baselines)), dtype="float32", baselines=baselines
        )
        assert ("bigram" in found["baselines"]) == baselines
        counted.append(sorted(seen))
    heldout = Store(options["store"]).split("heldout").tolist()
    assert counted == [heldout, heldout]
