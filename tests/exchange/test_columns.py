"""Which column of a file is which layer: by the name of a convention, never by the numbers."""

import pytest

from paceline.errors import LayerError
from paceline.exchange.columns import Said, columns_of


@pytest.mark.parametrize(
    ("ids", "convention", "last_norm", "aux", "columns", "last"),
    [
        # The same layers of 61, counted in two ways (E07).
        ((1, 29, 57, 60), "layer_output", "pre", (2, 30, 58), (0, 1, 2), 3),
        ((2, 30, 58, 61), "vllm", "pre", (2, 30, 58), (0, 1, 2), 3),
        # Seen in use with Kimi-K2.5, in speculators' counting.
        ((2, 30, 58, 60), "speculators_0.3", "pre", (3, 31, 59), (0, 1, 2), 3),
        # Any order, the last state anywhere.
        ((61, 58, 2), "hidden_state_index", "pre", (2, 58), (2, 1), 0),
        # transformers' own last entry has been through the norm.
        ((2, 30, 61), "transformers", "post", (2, 30), (0, 1), 2),
    ],
)
def test_lists_of_all_layers(ids, convention, last_norm, aux, columns, last):
    found = columns_of(Said(ids, convention, last_norm), 61, last_apart=False)
    assert (found.plan.aux, found.plan.last) == (aux, 61)
    assert (found.aux, found.last) == (columns, last)


def test_a_last_state_apart_has_no_id():
    found = columns_of(Said((57, 1, 29), "layer_output", "post"), 61, last_apart=True)
    assert found.plan.aux == (2, 30, 58)
    assert (found.aux, found.last) == ((1, 2, 0), None)


@pytest.mark.parametrize(
    ("ids", "convention", "last_norm", "message"),
    [
        ((2, 30, 58), "vllm", "pre", "do not hold the last state, id 61 of"),
        ((2, 30, 61), "transformers", "pre", "is after the final norm: say last_norm post"),
        ((61,), "vllm", "pre", "needs an auxiliary layer besides the last state"),
        ((2, 70, 61), "vllm", "pre", "k = 70 is outside 0 .. 61"),
        ((-1, 60), "layer_output", "pre", "id -1 does not exist"),
        ((2, 2, 61), "vllm", "pre", "are not distinct"),
    ],
)
def test_what_cannot_be_is_an_error(ids, convention, last_norm, message):
    with pytest.raises(LayerError, match=message):
        columns_of(Said(ids, convention, last_norm), 61, last_apart=False)
