"""Expected acceptance: the chances by plain forwards, the walk by simulation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.acceptance.counts import Answer, walk
from paceline.draft.batch import pack
from paceline.draft.unroll import Unroll
from paceline.evaluate.expected import Chances, chances_of_rows, expected_counts
from paceline.evaluate.sampling import Sampled
from paceline.target.model import TeacherHead
from paceline.target.tap import LayerTap
from tests.evaluate.tiny_pair import NUM_LAYERS, PLAN, tiny_pair

TEMPERATURE = 0.8
LONGEST = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("target"), vocab_size=12, draft_vocab_size=7)


def document(pair, ids, mask):
    """As a store holds it: states of all rows up to the last but one supervised position."""
    tap = LayerTap(pair.model, PLAN, NUM_LAYERS)
    with torch.inference_mode():
        pair.model(torch.tensor([ids]))
    mask = np.array(mask, bool)
    num_rows = int(np.flatnonzero(mask)[-1])
    aux = torch.stack([tap.states[k][0] for k in PLAN.aux], 1)[:num_rows]
    last = tap.states[PLAN.last][0][torch.from_numpy(mask)]
    tap.close()
    return SimpleNamespace(input_ids=np.array(ids), loss_mask=mask, aux=aux, last=last)


@torch.inference_mode()
def slow_chances(pair, doc, row, step):
    """(overlap, taken) of one row and step: one row unrolled alone, distributions as lists."""
    ids = doc.input_ids.tolist()
    aux = doc.aux[: row + 1]
    positions = torch.arange(row + 1)
    unroll = Unroll(
        pair.draft, aux, torch.tensor(ids[1 : row + 2]), positions, torch.zeros_like(positions)
    )
    state = unroll.first(torch.tensor([row]))
    for j in range(step):
        state = unroll.next(torch.tensor([ids[row + 2 + j]]))
    q_draft = (pair.draft.logits(state)[0].double() / TEMPERATURE).softmax(-1).tolist()
    q = [0.0] * 12
    for draft_id, chance in enumerate(q_draft):
        q[draft_id + int(pair.draft.d2t[draft_id])] = chance
    p = pair.distribution(ids[: row + 2 + step], TEMPERATURE).tolist()
    token = ids[row + 2 + step] if row + 2 + step < len(ids) else None
    taken = 0.0 if token is None else min(1.0, q[token] / p[token])
    return sum(map(min, p, q)), taken


def test_the_chances_are_those_of_plain_forwards(pair):
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    first = document(pair, ids, [0, 0, 1, 1, 1, 1, 0, 0, 1, 1])
    second = document(pair, ids[::-1], [0, 1, 1, 1, 0, 0, 0, 0, 0, 0])
    head = TeacherHead(pair.target, torch.float32)
    overlap, taken = chances_of_rows(pair.draft, head, pack([first, second]), LONGEST, TEMPERATURE)
    start = 0
    num_known = 0
    for doc in (first, second):
        mask = [*doc.loss_mask.tolist(), False]
        for row in range(len(doc.aux)):
            for step in range(LONGEST):
                place = start + row, step
                # p after token row + 1 + step is on record where that and all before are answers.
                if not all(mask[row + 1 : row + 2 + step]):
                    assert torch.isnan(overlap[place]) and taken[place] == 0
                    continue
                expected = slow_chances(pair, doc, row, step)
                assert overlap[place] == pytest.approx(expected[0], abs=1e-5)
                if mask[row + 2 + step]:
                    assert taken[place] == pytest.approx(expected[1], rel=1e-3, abs=1e-5)
                else:
                    assert taken[place] == 0
                num_known += 1
        start += len(doc.aux)
    assert num_known > 12
    assert 0.1 < float(overlap[~torch.isnan(overlap)].mean()) < 0.9


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(1, 4))
def test_certain_chances_give_the_greedy_walk(matches, num_draft_tokens):
    """Tokens that are taken for certain or never: the walk of a greedy chain."""
    n = len(matches)
    matches = [min(m, n - i) for i, m in enumerate(matches)]
    taken = np.array([[float(j < m) for j in range(4)] for m in matches])
    overlap = taken.copy()
    known = np.arange(n, 0, -1)
    overlap[known[:, None] <= np.arange(4)] = np.nan
    found = expected_counts(Chances(overlap, taken), num_draft_tokens)
    wanted = walk([Answer(np.array(matches), known)], num_draft_tokens)
    assert found.verify_steps == wanted.verify_steps
    assert found.accepted == wanted.accepted
    assert found.per_position.tolist() == wanted.per_position.tolist()
    assert found.left_out == wanted.left_out


def test_the_expected_walk_is_the_mean_of_simulated_ones():
    rng = np.random.default_rng(2)
    taken = rng.random((12, 3))
    overlap = rng.random((12, 3))
    overlap[10:, 2] = np.nan
    overlap[11:, 1] = np.nan
    found = expected_counts(Chances(overlap, taken), 3)
    runs = 4000
    steps, accepted, left_out = 0, np.zeros(3), 0
    for _ in range(runs):
        at = 0
        while at < 12:
            length = next((j for j in range(3) if rng.random() >= taken[at, j]), 3)
            if np.isnan(overlap[at]).any():
                left_out += 1
            else:
                steps += 1
                # What is taken is counted by its chance over all next tokens, not by this one.
                reached = [j for j in range(3) if j <= length]
                accepted[reached] += overlap[at, reached]
            at += length + 1
    assert found.verify_steps == pytest.approx(steps / runs, rel=0.03)
    assert found.per_position == pytest.approx(accepted / runs, rel=0.05)
    assert found.left_out == pytest.approx(left_out / runs, rel=0.1)
    assert found.accepted == pytest.approx(found.per_position.sum())


def test_sampled_decoding_accepts_what_was_expected(pair):
    """Over answers that the target samples alone, against decoding with the draft."""
    prompt, length, runs = [3, 1, 4], 9, 80
    head = TeacherHead(pair.target, torch.float32)
    rule = Sampled(TEMPERATURE, seed=1)
    steps = accepted = 0.0
    for _ in range(runs):
        answer = pair.decoder.alone(prompt, length + 3, set(), rule)
        doc = document(pair, prompt + answer, [False] * 3 + [True] * (length + 3))
        overlap, taken = chances_of_rows(pair.draft, head, pack([doc]), LONGEST, TEMPERATURE)
        # Points after the first token of the answer and on, as long as the answer goes.
        points = slice(2, 2 + length - 1)
        counts = expected_counts(Chances(overlap[points].numpy(), taken[points].numpy()), LONGEST)
        assert counts.left_out == 0
        steps, accepted = steps + counts.verify_steps, accepted + counts.accepted
    decoded = [pair.decoder.decode(prompt, LONGEST, length, set(), rule) for _ in range(runs)]
    seen_steps = sum(d.counts.verify_steps for d in decoded)
    seen = sum(d.counts.accepted for d in decoded) / seen_steps
    assert accepted / steps == pytest.approx(seen, abs=4 * 1.5 / seen_steps**0.5)


def test_mode_chain_expects_at_a_temperature(tiny_run, tmp_path):
    common = {"draft": str(tiny_run / "train"), "store": str(tiny_run / "extract")}
    common |= {"dtype": "float32", "num_draft_tokens": [1, 3], "bootstrap": 200}
    warm = paceline.evaluate(temperature=0.7, out=str(tmp_path / "warm"), **common)
    assert warm["baselines"] == {}
    for k in (1, 3):
        pooled = warm["results"][str(k)]["pooled"]
        assert 1.0 < pooled["acceptance_length"] < k + 1
        assert pooled["interval"][0] <= pooled["acceptance_length"] <= pooled["interval"][1]
        assert pooled["accepted"] == pytest.approx(
            sum(pooled["per_position"]) * pooled["verify_steps"]
        )
    # As the temperature goes to 0 the target's own tokens are nearly certain, and so is the walk of
    # what the draft is nearly certain of.
    greedy = paceline.evaluate(baselines=False, out=str(tmp_path / "greedy"), **common)
    cold = paceline.evaluate(temperature=1e-4, out=str(tmp_path / "cold"), **common)
    found, wanted = (r["results"]["1"]["pooled"] for r in (cold, greedy))
    assert found["acceptance_length"] == pytest.approx(wanted["acceptance_length"], abs=0.02)
