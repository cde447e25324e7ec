"""vLLM's counters as a text page: what is read, summed and taken as a difference."""

import pytest

from paceline.acceptance.counts import pool
from paceline.errors import EvaluationError
from paceline.evaluate.metrics import DraftCounters, of_page

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a {b} \\"c\\""} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 36
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 1.5e1 1764000000000
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1",model_name="a"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="2"} 2.0
vllm:generation_tokens_total{engine="0",model_name="a"} 40.0
vllm:num_requests_running{engine="0",model_name="a"} 1.0
other:spec_decode_num_drafts_total 999.0
"""


def test_a_page_is_summed_over_engines():
    assert of_page(PAGE) == DraftCounters(12, 36, 15, (9, 4, 2), 40)
    assert of_page(PAGE).num_draft_tokens == 3


def test_a_server_without_a_draft_has_no_chain():
    assert of_page("vllm:generation_tokens_total 3\n").num_draft_tokens == 0


def test_acceptance_is_of_the_difference_of_two_readings():
    """A01's steps, after others that are not ours: accepted 3, 0, 1, 2 of K = 3."""
    before = DraftCounters(100, 300, 50, (30, 15, 5), 500)
    after = DraftCounters(104, 312, 56, (33, 17, 6), 511)
    pooled = pool([after.since(before, 11).counts()], bootstrap=100, seed=0)
    assert pooled["acceptance_length"] == 2.5
    assert pooled["per_position"] == [0.75, 0.5, 0.25]
    assert (pooled["verify_steps"], pooled["accepted"]) == (4, 6)


@pytest.mark.parametrize("later", [DraftCounters(1, 3, 1, (1, 0, 0)), DraftCounters(9, 9, 9, (9,))])
def test_a_server_that_was_started_anew_is_found_out(later):
    with pytest.raises(EvaluationError, match="started anew"):
        later.since(DraftCounters(2, 6, 2, (1, 1, 0)), 0)


@pytest.mark.parametrize("counted", [9, 11])
def test_tokens_that_were_written_for_somebody_else_are_found_out(counted):
    before = DraftCounters(2, 6, 2, (1, 1, 0), 100)
    after = DraftCounters(4, 12, 2, (1, 1, 0), 100 + counted)
    with pytest.raises(EvaluationError, match=f"counted {counted} tokens.*answers have 10"):
        after.since(before, 10)
