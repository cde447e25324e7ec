"""Where two answers part, and whether it was a close call."""

import pytest

from paceline.evaluate.outputs import compare, first_difference, summary


@pytest.mark.parametrize(
    ("own", "other", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)],
)
def test_the_first_difference(own, other, at):
    assert first_difference(own, other) == at


def test_each_difference_is_asked_for_its_gap_and_near_ties_are_counted():
    own = {("a", 0): [1, 2, 3], ("a", 1): [4], ("b", 0): [5, 6], ("c", 0): [7, 8]}
    others = {("a", 0): [1, 2, 9], ("a", 1): [4], ("b", 0): [5], ("c", 0): [0, 8]}
    asked = []

    def gap(key, before, a, b):
        asked.append((key, before, a, b))
        return {"a": 2e-4, "c": 0.7}[key[0]]

    differences = compare(own, others, 3, gap)
    # An answer that ends early has no other token to weigh.
    assert asked == [(("a", 0), [1, 2], 3, 9), (("c", 0), [], 7, 0)]
    found = summary(differences, 4)
    assert (found["equal_outputs"], found["outputs"], found["near_ties"]) == (1, 4, 1)
    assert [d["gap"] for d in found["differences"]] == [2e-4, None, 0.7]
    assert found["differences"][0] == {
        "conversation": "a",
        "turn": 0,
        "num_draft_tokens": 3,
        "position": 2,
        "own": 3,
        "other": 9,
        "gap": 2e-4,
    }
