"""The draft vocabulary: what is chosen, how it is written, what is refused."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.align import count_supervised, coverage_curve, select_vocabulary
from paceline.errors import FingerprintMismatch, StoreCorruption, UsageError, VocabularyError
from paceline.vocab import DraftVocabulary, load_vocabulary

from .lines import extracted, prepared


def counts_of(counts, vocab_size):
    array = np.zeros(vocab_size, np.int64)
    for token, count in counts.items():
        array[token] = count
    return array


def test_V01_too_few_tokens_are_filled_with_the_lowest_unused():
    chosen = select_vocabulary(counts_of({7: 5, 2: 3, 9: 1}, 10), 6, 10)
    assert chosen.vocabulary.selected.tolist() == [0, 1, 2, 3, 7, 9]
    assert chosen.vocabulary.d2t.tolist() == [0, 0, 0, 0, 3, 4]
    assert np.flatnonzero(chosen.vocabulary.t2d).tolist() == [0, 1, 2, 3, 7, 9]
    assert chosen.vocabulary.t2d.sum() == len(chosen.vocabulary.d2t) == 6
    assert chosen.num_filler == 3
    with pytest.raises(VocabularyError, match="above the target's logit width 10"):
        select_vocabulary(counts_of({7: 5}, 10), 11, 10)


def test_V01_the_fillers_are_told(tmp_path, caplog):
    data = prepared(tmp_path, num_rows=3)
    result = paceline.align(data=str(data), out=str(tmp_path / "vocab"), draft_vocab_size=200)
    assert result["num_filler"] > 0
    assert f"{result['num_filler']} ids" in caplog.text


def test_V02_d2t_holds_offsets():
    vocabulary = DraftVocabulary.from_selected(np.array([2, 5, 6]), 8)
    assert vocabulary.d2t.tolist() == [2, 4, 4]
    assert vocabulary.t2d.tolist() == [False, False, True, False, False, True, True, False]
    assert vocabulary.selected.tolist() == [2, 5, 6]
    full = DraftVocabulary.from_selected(np.arange(4), 4)
    assert full.d2t.tolist() == [0, 0, 0, 0]
    full.check()
    absolute = DraftVocabulary(np.array([2, 5, 6]), vocabulary.t2d)
    with pytest.raises(VocabularyError, match="offsets"):
        absolute.check()
    inside = DraftVocabulary(np.array([0, 1, 2]), vocabulary.t2d)
    with pytest.raises(VocabularyError, match="do not agree"):
        inside.check()


@given(st.sets(st.integers(0, 30), min_size=1))
def test_V02_there_and_back(ids):
    selected = sorted(ids)
    vocabulary = DraftVocabulary.from_selected(np.array(selected), 31)
    vocabulary.check()
    assert [i + int(vocabulary.d2t[i]) for i in range(len(selected))] == selected


def test_V05_a_mapping_is_never_reused_for_other_work(tmp_path):
    counts = counts_of({1: 9, 2: 8, 3: 7, 4: 6}, 10)
    assert len(select_vocabulary(counts, 4, 10).vocabulary.d2t) == 4
    assert select_vocabulary(counts, 2, 10).vocabulary.selected.tolist() == [1, 2]
    data, out = str(prepared(tmp_path)), str(tmp_path / "vocab")
    paceline.align(data=data, out=out, draft_vocab_size=40)
    with pytest.raises(FingerprintMismatch, match="draft_vocab_size: was 40, now 20"):
        paceline.align(data=data, out=out, draft_vocab_size=20)
    assert len(load_vocabulary(out).d2t) == 40
    paceline.align(data=data, out=out, draft_vocab_size=20, overwrite=True)
    assert len(load_vocabulary(out).d2t) == 20
    paceline.prepare(
        target=str(tmp_path / "target"),
        data=[str(tmp_path / "rows.jsonl")],
        out=str(tmp_path / "shorter"),
        max_length=16,
    )
    with pytest.raises(FingerprintMismatch, match="fingerprint"):
        paceline.align(data=str(tmp_path / "shorter"), out=out, draft_vocab_size=20)


def test_an_end_of_turn_that_the_tokenizer_cannot_say_is_left_out():
    chosen = select_vocabulary(counts_of({3: 4, 5: 2}, 12), 2, 10, always=(5, 11))
    assert chosen.vocabulary.selected.tolist() == [3, 5]


def test_counts_that_prepare_did_not_write_are_refused(tmp_path):
    data = prepared(tmp_path)
    path = data / "supervised_token_counts.npy"
    np.save(path, np.load(path)[::-1].copy())
    with pytest.raises(StoreCorruption, match=r"supervised_token_counts\.npy: was"):
        paceline.align(data=str(data), out=str(tmp_path / "vocab"), draft_vocab_size=64)


def test_data_that_train_nothing_choose_no_vocabulary(tmp_path):
    data = str(prepared(tmp_path, heldout_share=1.0))
    with pytest.raises(VocabularyError, match="no supervised token of split 'train'"):
        paceline.align(data=data, out=str(tmp_path / "vocab"), draft_vocab_size=64)
    # The full vocabulary is no choice.
    paceline.align(data=data, out=str(tmp_path / "full"), draft_vocab_size=320)
    assert len(load_vocabulary(tmp_path / "full").d2t) == 320


def test_a_store_says_the_same_as_its_data(tmp_path):
    store = extracted(tmp_path)
    sizes = {"draft_vocab_size": 64, "out": str(tmp_path / "again")}
    result = paceline.align(store=str(store), **sizes)
    by_data, by_store = load_vocabulary(tmp_path / "vocab"), load_vocabulary(tmp_path / "again")
    assert by_data.d2t.tolist() == by_store.d2t.tolist()
    assert by_data.t2d.tolist() == by_store.t2d.tolist()
    assert result["end_of_turn_ids"] == [1]
    with pytest.raises(UsageError, match="`data`"):
        paceline.align(store=str(store), data=str(tmp_path / "prepare"), **sizes)


def test_a_sample_is_counted_at_the_cost_of_its_own_tokens():
    ids, mask = np.array([5, 7, 7, 9], np.int32), np.array([0, 1, 1, 1], bool)
    tracemalloc.start()
    try:
        counts = count_supervised([(ids, mask)] * 3, vocab_size=1_000_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (counts[7], counts[9], counts.sum()) == (6, 3, 9)
    # The counts themselves are 8 MB.
    assert peak < 12e6


def test_V07_the_map_has_the_logit_width_and_no_padding_ids():
    chosen = select_vocabulary(counts_of({3: 4, 9: 2}, 12), 4, 10)
    assert len(chosen.vocabulary.t2d) == 12
    assert chosen.vocabulary.selected.tolist() == [0, 1, 3, 9]
    for size in (11, 13):
        with pytest.raises(VocabularyError):
            select_vocabulary(counts_of({3: 4}, 12), size, 10)
    assert select_vocabulary(counts_of({3: 4}, 12), 12, 10).vocabulary.selected.tolist() == [
        *range(12)
    ]


def test_V07_tokens_that_end_a_turn_are_always_in():
    counts = counts_of({3: 4, 9: 2, 5: 1}, 12)
    assert select_vocabulary(counts, 2, 10, always=(7,)).vocabulary.selected.tolist() == [3, 7]
    with pytest.raises(VocabularyError, match="no room"):
        select_vocabulary(counts, 1, 10, always=(7, 8))


def test_coverage_is_the_share_of_supervised_tokens():
    counts = np.zeros(600, np.int64)
    counts[:300] = 1
    counts[599] = 700
    curve = {c["draft_vocab_size"]: c["coverage"] for c in coverage_curve(counts)}
    assert curve == {256: pytest.approx(0.955), 512: 1.0, 600: 1.0}
    assert select_vocabulary(counts, 1, 600).coverage == pytest.approx(0.7)
