"""Auxiliary layers in a server's config: which key it reads, in which convention, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import ExportError
from paceline.forms.carry import FORMS
from paceline.forms.names import SGLANG
from paceline.target.layers import default_aux_layers, from_convention, to_convention

IDS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"


def write_layer_ids(aux_layers: tuple[int, ...], form: str, num_layers: int) -> dict[str, Any]:
    """Config entries for auxiliary layers k of a target of `num_layers` layers.

    vLLM reads the top-level key first, SGLang the nested one alone. Where that is missing SGLang
    captures layers of its own choice: k = 2, n // 2, n - 3 for most targets, each one higher for
    MiniMax-M3. So the default layers are said too.
    """
    entries: dict[str, Any] = {IDS: list(to_convention(aux_layers, "vllm", num_layers))}
    if form == SGLANG:
        convention = FORMS[form].layer_convention
        entries[NESTED] = {
            IDS: list(to_convention(aux_layers, convention, num_layers)),
            "use_aux_hidden_state": True,
        }
    return entries


def read_layer_ids(values: Mapping[str, Any], form: str | None, num_layers: int) -> tuple[int, ...]:
    """Auxiliary layers k that a config asks for, as the form's server reads it: ascending, in
    whatever order the ids are, for servers collect the states while the layers run.

    form: None for a checkpoint that does not say which server it was written for; the top-level
    key is vLLM's. Raises ExportError for a nested key alone (two servers read it differently), and
    for two keys that contradict each other.
    """
    top, nested = values.get(IDS), (values.get(NESTED) or {}).get(IDS)
    if form is None and nested and not top:
        raise ExportError(
            f"{NESTED}.{IDS} = {nested} means the layers {nested} to vLLM and "
            f"{[i + 1 for i in nested]} to SGLang: say which one it was written for (form)"
        )
    by_top = _captured(top, "vllm", num_layers) if top else None
    if form != SGLANG:
        if by_top is None and nested:
            by_top = _captured(nested, "vllm", num_layers)
        return by_top or default_aux_layers(num_layers)
    by_nested = (
        _captured(nested, FORMS[form].layer_convention, num_layers)
        if nested
        else default_aux_layers(num_layers)
    )
    if by_top and by_top != by_nested:
        raise ExportError(
            f"{IDS} = {top} means the layers k = {list(by_top)}, but SGLang would read "
            f"{list(by_nested)} ({NESTED}: {nested}): the two must say the same"
        )
    return by_nested


def _captured(ids: Sequence[int], convention: str, num_layers: int) -> tuple[int, ...]:
    return tuple(sorted(from_convention(ids, convention, num_layers)))
