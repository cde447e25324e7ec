"""Speculative sampling writes what the target would: its joint distribution, cell by cell."""

from itertools import product

import numpy as np
import pytest
import torch

from paceline.evaluate.sampling import Drafted, Sampled
from tests.evaluate.tiny_pair import tiny_pair

TEMPERATURE = 0.7
PROMPT = [3, 1, 4, 1]
LENGTH = 3
RUNS = 700
# One false alarm in 10,000 seeds; the seed is fixed.
NORMAL_QUANTILE = 3.719


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def joint(pair):
    """Chance of each answer of three tokens."""
    after = {
        head: pair.distribution([*PROMPT, *head], TEMPERATURE)
        for n in range(LENGTH)
        for head in product(range(6), repeat=n)
    }
    return {
        answer: np.prod([after[answer[:i]][token] for i, token in enumerate(answer)])
        for answer in product(range(6), repeat=LENGTH)
    }


def is_alarm(seen, joint):
    """Pearson's chi-square above its 0.9999 quantile; cells that expect under 5 are one cell."""
    expected = {answer: RUNS * chance for answer, chance in joint.items()}
    large = [answer for answer, count in expected.items() if count >= 5]
    cells = [(seen.count(a), expected[a]) for a in large]
    rest = sum(count for a, count in expected.items() if a not in large)
    cells.append((len(seen) - sum(n for n, _ in cells), rest))
    assert rest >= 5 and len(cells) > 20
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the quantile.
    spread = 2 / (9 * freedom)
    return statistic > freedom * (1 - spread + NORMAL_QUANTILE * spread**0.5) ** 3


class NoResidual(Sampled):
    """Wrong on purpose: what stands in for a refused token is drawn from p, not from p - q."""

    def verify(self, drafted, logits_KV):
        written = []
        for one, logits_V in zip(drafted, logits_KV):
            p_V = self._distribution(logits_V)
            if self._uniform() * one.q[one.token] >= p_V[one.token]:
                return [*written, self._draw(p_V)]
            written.append(one.token)
        return [*written, self.write(logits_KV[-1])]


@pytest.mark.parametrize(("rule", "alarm"), [(Sampled, False), (NoResidual, True)])
def test_sampled_answers_are_distributed_as_the_targets_own(rule, alarm, pair, joint):
    chosen = rule(TEMPERATURE, seed=11)
    decoded = [pair.decoder.decode(PROMPT, 2, LENGTH, set(), chosen) for _ in range(RUNS)]
    seen = [tuple(d.tokens) for d in decoded]
    steps = sum(d.counts.verify_steps for d in decoded)
    accepted = sum(d.counts.accepted for d in decoded)
    # Both ways of writing a token are there to be tested.
    assert 0.15 < accepted / (2 * steps) < 0.85
    assert is_alarm(seen, joint) == alarm


def test_a_token_is_taken_as_often_as_the_distributions_overlap():
    p = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    q = torch.tensor([0.1, 0.3, 0.3, 0.3], dtype=torch.float64)
    rule = Sampled(1.0, seed=5)
    runs, taken, after = 8000, 0, np.zeros(4)
    for _ in range(runs):
        written = rule.verify([Drafted(rule._draw(q), q)], torch.stack([p.log(), p.log()]))
        taken += len(written) == 2
        after[written[0]] += 1
    # Five standard deviations of a share.
    assert abs(taken / runs - 0.6) < 5 * 0.5 / runs**0.5
    assert np.abs(after / runs - p.numpy()).max() < 5 * 0.5 / runs**0.5


def test_the_same_seed_writes_the_same(pair):
    decode = lambda seed: pair.decoder.decode(PROMPT, 2, 12, set(), Sampled(1.0, seed)).tokens
    assert decode(3) == decode(3)
    assert len({tuple(decode(seed)) for seed in range(5)}) > 1
