"""The draft's steps over chosen rows: training-time test, server-free chains and real decoding.

Step 0 needs keys and values of every row of a document, and all else only of the rows that are
asked for; each later step works on a subset of the rows of the step before (DESIGN: draft step).
Legend: T rows with auxiliary states, R rows of the current step, E draft width.
"""

from collections.abc import Sequence

import torch

from paceline.draft.model import Draft
from paceline.ops.attention import RowSpans, rows_attention

KeysValues = tuple[torch.Tensor, torch.Tensor]  # [T, G, K] each


class Unroll:
    """Unrolls a draft from fixed auxiliary states.

    aux [T, A, D]; next_ids int64 [T], the token after each row; positions int64 [T], the row's
    place in its document; starts int64 [T], the index of the document's first row. Documents lie
    one after the other. past: step-0 keys and values of P earlier rows, one pair a layer (from
    `step_0_keys` of an earlier unroll); `starts` then counts over P + T rows.
    """

    def __init__(
        self,
        draft: Draft,
        aux_TAD: torch.Tensor,
        next_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        starts_T: torch.Tensor,
        past: Sequence[KeysValues] | None = None,
    ) -> None:
        self.draft = draft
        self.step_0_keys: list[KeysValues] = []
        self._past = past
        self._positions_T = positions_T
        self._starts_T = starts_T.cpu()
        self._fused_TE = draft.fuse(aux_TAD)
        self._next_ids_T = next_ids_T
        self._own_keys: list[list[KeysValues]] = []
        self.state_RE: torch.Tensor = self._fused_TE
        self._step = 0

    def first(self, rows_R: torch.Tensor) -> torch.Tensor:
        """Step 0 at `rows` (ascending indices into T): the residual stream [R, E]."""
        layers = self.draft.layers
        cos, sin = self.draft.rotary(self._positions_T, self._fused_TE.dtype)
        embedding_TE = self.draft.embed(self._next_ids_T)
        num_past = len(self._past[0][0]) if self._past else 0
        everything = RowSpans(self._starts_T, num_past + torch.arange(len(self._starts_T)))
        asked = everything.select(rows_R)
        state_TE = self._fused_TE
        for layer in layers[:-1]:
            z = layer.attention_input(embedding_TE, state_TE)
            q = layer.self_attn.queries(z, cos, sin)
            k, v = self._keep_keys(layer.self_attn.keys_values(z, cos, sin))
            state_TE = layer.finish(state_TE, rows_attention(q, k, v, [], [], everything))
        z = layers[-1].attention_input(embedding_TE, state_TE)
        k, v = self._keep_keys(layers[-1].self_attn.keys_values(z, cos, sin))
        q = layers[-1].self_attn.queries(z[rows_R], cos[rows_R], sin[rows_R])
        mixed = rows_attention(q, k, v, [], [], asked)
        self._own_keys = [[] for _ in layers]
        self._spans, self._rows_R, self._step = asked, rows_R, 0
        self.state_RE = layers[-1].finish(state_TE[rows_R], mixed)
        return self.state_RE

    def next(self, ids_R: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """The following step: each row reads its own last state and the embedding of `ids`.

        keep: indices of the rows that go on (ascending), None for all; ids int64 [rows kept].
        Returns the residual stream [rows kept, E].
        """
        state = self.draft.norm(self.state_RE) if self.draft.config.norm_output else self.state_RE
        if keep is not None:
            state = state[keep]
            self._rows_R = self._rows_R[keep]
            self._spans = self._spans.select(keep)
            self._own_keys = [[(k[keep], v[keep]) for k, v in own] for own in self._own_keys]
        self._step += 1
        positions = self._positions_T[self._rows_R] + self._step
        cos, sin = self.draft.rotary(positions, state.dtype)
        embedding = self.draft.embed(ids_R)
        for i, layer in enumerate(self.draft.layers):
            z = layer.attention_input(embedding, state)
            q = layer.self_attn.queries(z, cos, sin)
            self._own_keys[i].append(layer.self_attn.keys_values(z, cos, sin))
            own_k, own_v = zip(*self._own_keys[i], strict=True)
            mixed = rows_attention(q, *self.step_0_keys[i], own_k, own_v, self._spans)
            state = layer.finish(state, mixed)
        self.state_RE = state
        return state

    def _keep_keys(self, new: KeysValues) -> KeysValues:
        """The next layer's step-0 keys and values, those of earlier rows before the new ones."""
        if self._past:
            old = self._past[len(self.step_0_keys)]
            new = (torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]]))
        self.step_0_keys.append(new)
        return new
