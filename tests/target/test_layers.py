"""The table of layer conventions, case by case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import LayerError
from paceline.target.layers import (
    CONVENTIONS,
    default_aux_layers,
    from_convention,
    plan_layers,
    to_convention,
)


def test_E07_ids_are_converted_by_the_name_of_their_convention():
    layers = 61
    assert from_convention([1, 29, 57], "layer_output", layers) == (2, 30, 58)
    assert from_convention([2, 30, 58], "hidden_state_index", layers) == (2, 30, 58)
    # A guess from the first id would go wrong here: output of layer 2 is k = 3.
    assert from_convention([2, 10, 20], "layer_output", layers) == (3, 11, 21)
    assert from_convention([2, 30, 58, 60], "speculators_0.3", layers) == (3, 31, 59, 61)


@pytest.mark.parametrize("name", sorted(CONVENTIONS))
def test_E07_there_and_back_is_the_identity_for_every_index(name):
    sayable = 0
    for k in range(62):
        try:
            ids = to_convention([k], name, 61)
        except LayerError:
            continue
        sayable += 1
        assert from_convention(ids, name, 61) == (k,)
    assert sayable >= 61


def test_what_a_convention_cannot_say_is_an_error():
    with pytest.raises(LayerError, match="k = 0 cannot be said"):
        to_convention([0], "sglang", 61)
    with pytest.raises(LayerError, match="before the final norm"):
        to_convention([61], "transformers", 61)
    with pytest.raises(LayerError, match="after the final norm"):
        from_convention([61], "transformers", 61)
    with pytest.raises(LayerError, match="unknown layer convention 'eagle'"):
        from_convention([1], "eagle", 61)


@given(st.integers(9, 200))
def test_default_layers_are_the_authors_choice(num_layers):
    assert default_aux_layers(num_layers) == (2, num_layers // 2, num_layers - 3)


@pytest.mark.parametrize("num_layers", [1, 2, 4, 5, 6])
def test_a_target_too_small_for_the_defaults_asks_for_explicit_layers(num_layers):
    with pytest.raises(LayerError, match="explicitly"):
        default_aux_layers(num_layers)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "at least one"),
        ([31], "outside 0 .. 30"),
        ([-1], "does not exist"),
        ([3, 3], "not distinct"),
        ([5, 2], "must ascend"),
    ],
)
def test_wrong_layers_are_refused_with_what_is_wrong(layers, message):
    with pytest.raises(LayerError, match=message):
        plan_layers(layers, 30)


def test_the_last_state_always_belongs_to_the_plan():
    plan = plan_layers([0, 30], 30)
    assert (plan.aux, plan.last, plan.all) == ((0, 30), 30, (0, 30, 30))
