"""Cuts: within the limit, whole answers where one fits, always something to learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.prepare.cutting import cut


def mask_of(text: str) -> np.ndarray:
    return np.array([character == "#" for character in text])


@pytest.mark.parametrize(
    ("mask", "max_length", "kept"),
    [
        ("..##..##", 8, "..##..##"),
        ("..##..##", 20, "..##..##"),
        # The second answer does not fit whole: the sample ends with the first.
        ("..##..##", 7, "..##"),
        # The cut falls between answers: nothing is broken.
        ("..##..##", 6, "..##.."),
        # No answer fits whole: the first is cut through.
        ("..######", 5, "..###"),
        ("########", 5, "#####"),
        # A token at place 0 is no target, so it is no answer that fits.
        ("#.######", 5, "#.###"),
        # The answer ends exactly at the limit.
        ("..##..", 4, "..##"),
        ("....##", 5, "....#"),
    ],
)
def test_where_samples_are_cut(mask: str, max_length: int, kept: str) -> None:
    where = cut(mask_of(mask), max_length)
    assert where is not None
    assert mask[: where.num_tokens] == kept
    assert where.supervised_lost == mask[len(kept) :].count("#")


@pytest.mark.parametrize(("mask", "max_length"), [("....##", 4), ("#....#", 5)])
def test_nothing_to_learn_within_the_limit(mask: str, max_length: int) -> None:
    assert cut(mask_of(mask), max_length) is None


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=40).map(np.array),
    max_length=st.integers(1, 45),
)
def test_a_cut_never_leaves_a_sample_without_targets(mask: np.ndarray, max_length: int) -> None:
    where = cut(mask, max_length)
    if where is None:
        assert len(mask) > max_length
        assert not mask[1:max_length].any()
        return
    kept = mask[: where.num_tokens]
    assert len(kept) <= max_length
    assert where.supervised_lost == mask.sum() - kept.sum()
    if len(mask) <= max_length:
        assert len(kept) == len(mask)
        return
    assert kept[1:].any()
    is_broken = len(kept) < len(mask) and kept[-1] and mask[len(kept)]
    if is_broken:
        # Then no whole answer fits: all that is supervised from place 1 on is the broken one.
        start = len(kept) - int(np.argmin(kept[::-1])) if not kept.all() else 0
        assert not kept[1:start].any()
