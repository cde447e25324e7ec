"""What a training step keeps from its forward pass for its backward pass, from the shapes alone.

It follows `draft.unroll`, `draft.layer` and `draft.losses`: norms, gated products and scores are
made again and do not count. Legend: T rows with states, R rows of a TTT step, E draft width, H / G
query / key heads, K head width, I inner width, W draft vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from paceline.draft.config import DraftConfig

# Of each row of a step: the norms' scales, and int64 indices of where it came from, the token it
# reads, its teacher, its position and its span of keys.
_FLOAT_BYTES, _INDEX_BYTES = 4, 8
_NUM_SCALES, _NUM_INDICES = 3, 6


def taught_rows(masks: Sequence[np.ndarray], num_steps: int) -> list[int]:
    """Rows supervised at each TTT step: bool [T] masks, one a document."""
    totals = np.zeros(num_steps, np.int64)
    for mask in masks:
        # A document's first token has no row before it that could be taught.
        edges = np.diff(np.concatenate([[0], mask[1:].astype(np.int8), [0]]))
        lengths = np.flatnonzero(edges < 0) - np.flatnonzero(edges > 0)
        for step in range(num_steps):
            totals[step] += np.maximum(lengths - step, 0).sum()
    return totals.tolist()


def kept_bytes(
    config: DraftConfig, num_rows: int, taught: Sequence[int], item: int, num_scores: float = 0.0
) -> int:
    """Bytes of T = num_rows rows of which `taught[j]` are supervised at step j, without the batch
    itself. item: bytes of a value. num_scores: attention scores that a query keeps in float32 and
    in the dtype of the arithmetic (none on CUDA, where they are made again)."""
    taught = [rows for rows in taught if rows]
    if not taught:
        return 0
    values = _first_step(config, num_rows, taught[0])
    for step, rows in enumerate(taught[1:], start=1):
        values += rows * (config.hidden_size + config.head_dim)
        values += config.num_layers * rows * (_row_values(config) + _own_keys(config, step))
    if len(taught) > 1:
        # What the tokens add to all heads is shared by the steps.
        values += taught[0] * (_queries(config) + _keys(config))
    # The loss keeps its gradient to each state.
    values += sum(taught) * config.hidden_size
    heads = config.num_attention_heads * config.num_layers
    # Of each head the scores' peak, and the scale of a norm.
    floats = _FLOAT_BYTES * (2 if config.qk_norm else 1)
    scores = sum(taught) * heads * (floats + num_scores * (_FLOAT_BYTES + item))
    small = _NUM_SCALES * _FLOAT_BYTES + _NUM_INDICES * _INDEX_BYTES
    return round(values * item + scores + (num_rows + sum(taught)) * small)


def weight_bytes(config: DraftConfig, item: int, trains_head: bool) -> int:
    """Copies of weights that a step makes: those of q, k, v joined, as they are and with the norms'
    gains multiplied in; the sum of the head's gradient, float32."""
    blocks = config.num_layers + 1
    joined = (_queries(config) + _keys(config)) * config.hidden_size * blocks
    head = config.draft_vocab_size * config.hidden_size * _FLOAT_BYTES
    return 2 * joined * item + (head if trains_head else 0)


def _first_step(config: DraftConfig, num_rows: int, asked: int) -> int:
    """Values that step 0 keeps: keys and values of all rows, all else of the rows asked for (of all
    rows in layers before the last)."""
    width, angles = config.hidden_size, config.head_dim
    # The fused states, the normed embeddings of all rows and once more of those asked for.
    values = num_rows * (2 * width + angles) + asked * (2 * width + angles)
    if config.aux_norm != "none":
        values += num_rows * config.num_aux * config.target_hidden_size
    if not config.shares_embedding:
        values += (num_rows + asked) * width
    values += config.num_layers * num_rows * _keys(config)
    rows = (config.num_layers - 1) * num_rows + asked
    if config.qk_norm:
        values += (num_rows - asked) * _keys(config) // 2
    return values + rows * (_row_values(config) - _keys(config))


def _row_values(config: DraftConfig) -> int:
    """Of one row in one layer: the heads and what attention mixes, the residual stream after
    attention and after the MLP, the MLP's two inner products."""
    heads = 2 * _queries(config) + _keys(config)
    values = heads + 2 * config.hidden_size + 2 * config.intermediate_size
    if config.qk_norm:
        values += _queries(config) + _keys(config) // 2
    return values


def _own_keys(config: DraftConfig, step: int) -> int:
    """From the second later step on, a row's own keys and values of all later steps are joined."""
    return step * _keys(config) if step > 1 else 0


def _queries(config: DraftConfig) -> int:
    return config.num_attention_heads * config.head_dim


def _keys(config: DraftConfig) -> int:
    return 2 * config.num_key_value_heads * config.head_dim
