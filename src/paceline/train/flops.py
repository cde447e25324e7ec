"""The floating-point operations that an optimiser step cannot do without, for its share of what the
device's matrix products reach (MFU)."""

from collections.abc import Sequence

import numpy as np

from paceline.draft.batch import PackedBatch
from paceline.draft.config import DraftConfig


def needed_flops(
    config: DraftConfig,
    batch: PackedBatch,
    num_steps: int,
    *,
    trains_head: bool = True,
    teacher_width: int | None = None,
) -> float:
    """Of one micro-batch, forward and backward; attention left out. Nothing is asked of the device.

    trains_head: whether the draft's head learns. teacher_width: logits that the teacher makes of a
    position; None: the draft vocabulary.
    """
    return flops_of_rows(
        config,
        len(batch.positions),
        _taught_rows(batch, num_steps).tolist(),
        len(batch.last),
        trains_head=trains_head,
        teacher_width=teacher_width,
    )


def flops_of_rows(
    config: DraftConfig,
    all_rows: int,
    taught: Sequence[int],
    teacher_rows: int,
    *,
    trains_head: bool = True,
    teacher_width: int | None = None,
) -> float:
    """As `needed_flops`, from numbers of rows: with states, supervised at each TTT step, of the
    teacher. Linear in them.

    A product of R rows with an I x O weight costs 2 R I O forward, as much for the gradient to the
    rows and as much for the gradient to the weight. T rows with states, R_j rows of step j, M
    teacher rows: fusion of T rows (2 of 3: states need no gradient); the token's half of q for R_0
    rows and of k and v for T rows (2 of 3: a frozen embedding; the same token at a later step costs
    nothing); the state's half of k and v for T rows at step 0, and of q, k, v, and output and MLP,
    for R_j rows; the draft's head for R_j rows (2 of 3 where it is frozen); the target's head for M
    rows, forward alone. Layers below the last need step 0 of all T rows in full.
    """
    width, target_width = config.hidden_size, config.target_hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys_values = 2 * config.num_key_value_heads * config.head_dim
    layer = width * (queries + keys_values) + queries * width + 3 * width * config.intermediate_size
    below = config.num_layers - 1
    asked = all_rows if below else taught[0]

    products = 2 * all_rows * config.num_aux * target_width * width
    token_passes = 2 if config.shares_embedding else 3
    products += token_passes * width * (asked * queries + all_rows * keys_values)
    products += 3 * below * layer * (all_rows + sum(taught[1:]))
    products += 3 * (layer * sum(taught) + width * keys_values * (all_rows - taught[0]))
    products += (3 if trains_head else 2) * width * config.draft_vocab_size * sum(taught)
    products += target_width * (teacher_width or config.draft_vocab_size) * teacher_rows
    return 2.0 * products


def _taught_rows(batch: PackedBatch, num_steps: int) -> np.ndarray:
    """How many rows are supervised at each TTT step, int64 [S]."""
    run_length = batch.supervised.run_length
    return (run_length[:, None] > np.arange(num_steps)).sum(0)
