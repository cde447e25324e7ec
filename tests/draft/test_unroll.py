"""The draft's steps: which keys a row sees, that documents do not leak, that training steps are
drafting steps."""

import torch

from paceline.draft.batch import pack
from paceline.draft.losses import unroll_states
from paceline.draft.unroll import Unroll

from . import oracle
from .tiny import random_doc, shape_of, stored, tiny_config, tiny_draft, weights_of


def test_T06_packed_documents_do_not_see_each_other():
    config = tiny_config()
    draft = tiny_draft(config)
    b = random_doc(config, [0, 1], 2)
    outputs = []
    for seed in (1, 7):
        batch = pack([stored(random_doc(config, [0, 1, 1], seed)), stored(b)])
        assert batch.positions.tolist() == [0, 1, 0]
        assert batch.starts.tolist() == [0, 0, 2]
        # Next-token targets [1, 1, 0 | 1, 0], the last rows not even stored.
        assert batch.run_length.tolist() == [2, 1, 1]
        states, steps = unroll_states(draft, batch, 2)
        assert [len(step.teacher) for step in steps] == [3, 1]
        outputs.append(states[0][2])
    assert torch.equal(*outputs)


def test_T06_a_step_needs_that_many_more_tokens_of_its_own_document():
    config = tiny_config()
    batch = pack([stored(random_doc(config, [0, 1, 1], 1)), stored(random_doc(config, [0, 1], 2))])
    assert [batch.supervised_rows(step).tolist() for step in range(3)] == [[0, 1, 2], [0], []]


def test_T09_each_row_sees_its_step_0_keys_and_one_own_key_a_step():
    """Count keys by their effect: moving a key's value moves exactly the rows that may see it."""
    config = tiny_config(num_attention_heads=1, num_key_value_heads=1)
    draft = tiny_draft(config)
    length, steps = 6, 4
    aux = random_doc(config, [0] * length, 3).aux
    ids = torch.arange(length + steps) % config.vocab_size
    positions, starts = torch.arange(length), torch.zeros(length, dtype=torch.int64)

    def last_states(moved_row: int | None) -> torch.Tensor:
        unroll = Unroll(draft, aux, ids[1 : length + 1], positions, starts)
        state = unroll.first(torch.arange(length))
        if moved_row is not None:
            unroll.step_0_keys[0][moved_row, 1] += 1.0  # its only head's value
        for step in range(1, steps):
            state = unroll.next(ids[torch.arange(length) + 1 + step])
        return state

    with torch.no_grad():
        plain = last_states(None)
        for row in range(length):
            changed = (last_states(row) - plain).abs().amax(1) > 1e-9
            assert changed.tolist() == [p >= row for p in range(length)]


def test_T09_training_steps_are_drafting_steps_with_true_tokens():
    """Three steps at every row in one pass == three steps from each row alone on its prefix."""
    config = tiny_config(num_layers=2)
    draft = tiny_draft(config)
    doc = random_doc(config, [1] * 9, 5)
    rows = torch.arange(6)
    ids = doc.ids
    positions, starts = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    with torch.no_grad():
        unroll = Unroll(draft, doc.aux[:8], ids[1:], positions, starts)
        together = [unroll.first(rows)]
        together += [unroll.next(ids[rows + 1 + step]) for step in (1, 2)]
        for p in rows.tolist():
            alone = Unroll(
                draft, doc.aux[: p + 1], ids[1 : p + 2], positions[: p + 1], starts[: p + 1]
            )
            state = alone.first(torch.tensor([p]))
            torch.testing.assert_close(state[0], together[0][p])
            for step in (1, 2):
                state = alone.next(ids[p + 1 + step][None])
                torch.testing.assert_close(state[0], together[step][p])


def test_earlier_rows_may_come_as_cached_keys():
    config = tiny_config(num_layers=2)
    draft = tiny_draft(config)
    doc = random_doc(config, [1] * 9, 5)
    positions, starts = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    with torch.no_grad():
        whole = Unroll(draft, doc.aux[:8], doc.ids[1:], positions, starts)
        expected = whole.first(torch.tensor([7]))
        past = None
        for part in (slice(0, 3), slice(3, 4), slice(4, 8)):
            size = part.stop - part.start
            piece = Unroll(
                draft, doc.aux[part], doc.ids[1:][part], positions[part], starts[:size], past
            )
            state = piece.first(torch.tensor([size - 1]))
            past = piece.step_0_keys
        torch.testing.assert_close(state, expected)


def test_a_chain_equals_the_oracle_reading_its_own_tokens():
    config = tiny_config()
    draft = tiny_draft(config)
    doc = random_doc(config, [1] * 7, 8)
    weights = {n: w.detach() for n, w in weights_of(draft).items()}
    embedding = draft.embed_tokens.weight.detach()
    targets = torch.arange(config.draft_vocab_size) + draft.d2t
    rows = torch.arange(6)
    with torch.no_grad():
        unroll = Unroll(draft, doc.aux[:6], doc.ids[1:], torch.arange(6), torch.zeros(6).long())
        proposed = [draft.propose(unroll.first(rows))]
        for _ in range(2):
            proposed.append(draft.propose(unroll.next(proposed[-1])))
    expected = []

    def read(step, p):
        if p + 1 >= len(doc.ids):
            return 0
        return int(doc.ids[p + 1]) if step == 0 else int(expected[step - 1][p])

    for step in range(3):
        states = oracle.states_of_steps(weights, shape_of(config), doc, embedding, step + 1, read)
        best = oracle.logits_of(weights, shape_of(config), states[step]).argmax(-1)
        expected.append(targets[best])
    for step in range(3):
        assert proposed[step].tolist() == expected[step][:6].tolist()
