"""The draft's steps over chosen rows: training-time test, server-free chains and real decoding.

Step 0 needs keys and values of every row of a document, and all else only of the rows that are
asked for; each later step works on a subset of the rows of the step before (docs/concepts.md).
Legend: T rows with auxiliary states, R rows of the current step, E draft width, G key heads, K head
width, J steps after step 0.
"""

from collections.abc import Sequence

import torch

from paceline.draft.layer import LayerArithmetic
from paceline.draft.model import Draft
from paceline.ops.attention import RowSpans
from paceline.ops.shared import Shared, take_rows

KeysValues = torch.Tensor  # [T, 2G, K], keys first


def prepared_layers(draft: Draft) -> list[LayerArithmetic]:
    return [LayerArithmetic(layer) for layer in draft.layers]


class Unroll:
    """Unrolls a draft from fixed auxiliary states.

    aux [T, A, D]; next_ids int64 [T], the token after each row; positions int64 [T], the row's
    place in its document; starts int64 [T], the index of the document's first row. Documents lie
    one after the other. past: step-0 keys and values of P earlier rows, one tensor a layer (from
    `step_0_keys` of an earlier unroll); `starts` then counts over P + T rows. layers: of
    `prepared_layers`, to share between unrolls of the same weights where no gradient is wanted.
    """

    def __init__(
        self,
        draft: Draft,
        aux_TAD: torch.Tensor,
        next_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        starts_T: torch.Tensor,
        past: Sequence[KeysValues] | None = None,
        layers: Sequence[LayerArithmetic] | None = None,
    ) -> None:
        self.draft = draft
        self.layers = layers or prepared_layers(draft)
        self.step_0_keys: list[KeysValues] = []
        self._past = past
        self._positions_T = positions_T
        num_past = len(past[0]) if past else 0
        own = torch.arange(num_past, num_past + len(starts_T), device=starts_T.device)
        self._spans = RowSpans(starts_T, own)
        self._fused_TE = draft.fuse(aux_TAD)
        self._next_ids_T = next_ids_T
        self._own_keys: list[torch.Tensor | None] = [None] * len(self.layers)  # [J, R, 2G, K]
        self._step = 0

    def first(self, rows_R: torch.Tensor | None) -> torch.Tensor:
        """Step 0 at `rows` (ascending indices into T; None for all): the residual stream [R, E]."""
        state = self._fused_TE
        angles = self.draft.rotary(self._positions_T, state.dtype)
        embedding_TE = self.draft.embed(self._next_ids_T)
        for i, layer in enumerate(self.layers):
            asked = rows_R if i + 1 == len(self.layers) else None
            state = self._first_of_layer(i, layer, state, embedding_TE, angles, asked)
        self._spans = self._spans.select(rows_R)
        self._positions_R = take_rows(self._positions_T, rows_R)
        self._rows_0 = rows_R
        self.state_RE = state
        return state

    def next(self, ids_R: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """The following step: each row reads its own last state and the embedding of `ids`.

        keep: indices of the rows that go on (ascending), None for all; ids int64 [rows kept].
        Returns the residual stream [rows kept, E].
        """
        layer = self.layers[0]
        part = layer.token_part(self.draft.embed(ids_R), layer.all_heads)
        return self._next(keep, {"token_part": part})

    def next_taught(self, source_R: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        """As `next`, where each row reads the token that one of step 0's rows read: `source`, int64
        [rows kept], counts over the rows of step 0. What tokens add to the heads is not computed
        again."""
        return self._next(keep, {"shared": self._shared_token_part(), "source": source_R})

    def _first_of_layer(
        self,
        number: int,
        layer: LayerArithmetic,
        state_TE: torch.Tensor,
        embedding_TE: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        rows_R: torch.Tensor | None,
    ) -> torch.Tensor:
        token_q, token_kv = None, None
        if number == 0:
            token_kv = layer.token_part(embedding_TE, layer.keys_values)
            token_q = layer.token_part(take_rows(embedding_TE, rows_R), layer.queries)
            self._token_parts = (token_q, token_kv)
        kv, state_TE = layer.heads(state_TE, layer.keys_values, *angles, token_kv)
        kv = self._keep_keys(kv)
        angles_R = [take_rows(angle, rows_R) for angle in angles]
        # The norm is made again for the rows asked: cheaper than a second gather and its gradient.
        q, state = layer.heads(take_rows(state_TE, rows_R), layer.queries, *angles_R, token_q)
        return layer.finish(state, q, kv, None, self._spans.select(rows_R))

    def _shared_token_part(self) -> Shared:
        """What the tokens of step 0's rows add to all heads, [R of step 0, (H + 2G) K]."""
        if self._shared is None:
            q, kv = self._token_parts
            if len(self.layers) > 1:
                q = take_rows(q, self._rows_0)
            self._shared = Shared(torch.cat([q, take_rows(kv, self._rows_0)], 1))
        return self._shared

    _shared: Shared | None = None

    def _next(self, keep: torch.Tensor | None, tokens: dict) -> torch.Tensor:
        state = self.draft.norm(self.state_RE) if self.draft.config.norm_output else self.state_RE
        state = take_rows(state, keep)
        self._positions_R = take_rows(self._positions_R, keep)
        self._spans = self._spans.select(keep)
        self._step += 1
        angles = self.draft.rotary(self._positions_R + self._step, state.dtype)
        for i, layer in enumerate(self.layers):
            own_tokens = tokens if i == 0 else {}
            heads, state = layer.heads(state, layer.all_heads, *angles, **own_tokens)
            num_queries = heads.shape[1] - self.step_0_keys[i].shape[1]
            q, own = heads.split([num_queries, heads.shape[1] - num_queries], 1)
            own = self._keep_own(i, own, keep)
            state = layer.finish(state, q, self.step_0_keys[i], own, self._spans)
        self.state_RE = state
        return state

    def _keep_keys(self, new: KeysValues) -> KeysValues:
        """The next layer's step-0 keys and values, those of earlier rows before the new ones."""
        if self._past:
            new = torch.cat([self._past[len(self.step_0_keys)], new])
        self.step_0_keys.append(new)
        return new

    def _keep_own(self, layer: int, new_RGK: torch.Tensor, keep: torch.Tensor | None):
        """A layer's own keys and values of all steps so far, [J, R, 2G, K]."""
        old = self._own_keys[layer]
        if old is None:
            self._own_keys[layer] = new_RGK[None]
        else:
            old = old if keep is None else old.index_select(1, keep)
            self._own_keys[layer] = torch.cat([old, new_RGK[None]])
        return self._own_keys[layer]
