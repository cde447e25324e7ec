"""Layer ids as each server reads them; its reading rules are written out here once more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ExportError, LayerError
from paceline.forms.layer_ids import read_layer_ids, write_layer_ids


def vllm_reads(config, n):
    """vLLM 0.22 and later: top level, then nested, as they are; else its defaults."""
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    ids = ids or config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(ids or (2, n // 2, n - 3))


SGLANG_TARGETS = ("llama", "deepseek", "minimax_m3_vl")


def sglang_reads(config, n, target):
    """SGLang 0.5.6 to 0.5.23: nested only, one more each; DeepSeek's rule looks at the first, and
    MiniMax-M3's (0.5.23, MiniMaxM3SparseForConditionalGeneration) adds one to its defaults too."""
    ids = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        defaults = (2, n // 2, n - 3)
        return tuple(k + 1 for k in defaults) if target == "minimax_m3_vl" else defaults
    if target == "deepseek" and ids[0] != 1:
        return tuple(ids)
    return tuple(i + 1 for i in ids)


def test_E07_servers_get_the_same_layers_in_their_own_counting():
    n = 61
    for form in ("vllm", "speculators", "sglang"):
        config = write_layer_ids((2, 31, 60), form, n)
        assert vllm_reads(config, n) == (2, 31, 60)
        assert read_layer_ids(config, form, n) == (2, 31, 60)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 30, 59]
    for target in SGLANG_TARGETS:
        assert sglang_reads(config, n, target) == (2, 31, 60)


@pytest.mark.parametrize("target", SGLANG_TARGETS)
def test_E07_the_default_layers_are_said_and_no_server_takes_its_own(target):
    config = write_layer_ids((2, 30, 58), "sglang", 61)
    assert sglang_reads(config, 61, target) == (2, 30, 58) == vllm_reads(config, 61)
    assert read_layer_ids(config, "sglang", 61) == (2, 30, 58)


@given(st.data())
def test_E07_every_list_that_a_form_can_say_comes_back(data):
    n = data.draw(st.integers(7, 80))
    aux = tuple(sorted(data.draw(st.sets(st.integers(0, n), min_size=1, max_size=5))))
    for form in ("vllm", "speculators"):
        config = write_layer_ids(aux, form, n)
        assert vllm_reads(config, n) == aux == read_layer_ids(config, form, n)
    if aux[0] == 2 and aux[-1] < n:
        config = write_layer_ids(aux, "sglang", n)
        for target in SGLANG_TARGETS:
            assert sglang_reads(config, n, target) == aux
        assert read_layer_ids(config, "sglang", n) == aux


def test_E07_ids_that_two_servers_read_differently_are_not_guessed():
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 10, 20]}}
    with pytest.raises(ExportError, match=r"\[2, 10, 20\] to vLLM and \[3, 11, 21\] to SGLang"):
        read_layer_ids(nested, None, 61)
    assert read_layer_ids(nested, "vllm", 61) == (2, 10, 20)
    assert read_layer_ids(nested, "sglang", 61) == (3, 11, 21)


def test_keys_that_contradict_each_other_are_refused():
    config = {
        "eagle_aux_hidden_state_layer_ids": [2, 31, 60],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 31, 60]},
    }
    with pytest.raises(ExportError, match=r"SGLang would read \[3, 32, 61\]"):
        read_layer_ids(config, "sglang", 61)
    with pytest.raises(ExportError, match=r"SGLang would read \[2, 30, 58\]"):
        read_layer_ids({"eagle_aux_hidden_state_layer_ids": [2, 31, 60]}, "sglang", 61)


def test_without_ids_every_server_takes_its_defaults():
    for form in (None, "vllm", "speculators", "sglang"):
        assert read_layer_ids({}, form, 30) == (2, 15, 27)


def test_ids_in_any_order_mean_the_layers_as_they_come():
    """Servers collect the states while the layers run; vLLM sorts the ids itself."""
    top = {"eagle_aux_hidden_state_layer_ids": [30, 2, 58]}
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [29, 1, 57]}}
    for form in (None, "vllm", "speculators"):
        assert read_layer_ids(top, form, 61) == (2, 30, 58)
    assert read_layer_ids(nested, "vllm", 61) == (1, 29, 57)
    for config in (nested, {**top, **nested}):
        assert read_layer_ids(config, "sglang", 61) == (2, 30, 58)


def test_layers_that_the_target_does_not_have_are_refused():
    with pytest.raises(LayerError, match="outside 0"):
        read_layer_ids({"eagle_aux_hidden_state_layer_ids": [2, 15, 31]}, "vllm", 30)
