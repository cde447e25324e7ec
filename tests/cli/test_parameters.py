"""Commands are made from the option models: nothing declared twice, every option reachable."""

from typing import Literal

import pytest

from paceline.cli.main import COMMANDS
from paceline.cli.parameters import parameters_of, values_of
from paceline.errors import UsageError
from paceline.recipe import (
    EvaluateOptions,
    ExtractOptions,
    InspectOptions,
    Options,
    PrepareOptions,
    RunOptions,
    TrainOptions,
    build,
    opt,
)
from tests.tiny_line import program


def _parameters(model):
    return {p.identifier: p for p in parameters_of(model)}


def test_names_are_the_models_own_with_dotted_groups():
    train = _parameters(TrainOptions)
    assert train["learning_rate"].option == "--learning-rate"
    assert train["draft__num_layers"].option == "--draft.num-layers"
    assert train["draft__num_layers"].path == ("draft", "num_layers")
    assert "draft" not in train


@pytest.mark.parametrize(
    ("model", "name", "kind", "metavar"),
    [
        (TrainOptions, "learning_rate", "value", "NUMBER"),
        (TrainOptions, "max_steps", "value", "INT"),
        (TrainOptions, "betas", "enumeration", "NUMBER"),
        (TrainOptions, "draft__qk_norm", "flag", ""),
        (TrainOptions, "schedule", "value", "cosine|linear|constant"),
        (TrainOptions, "trackers", "enumeration", "tensorboard|wandb|trackio"),
        (ExtractOptions, "layers", "enumeration", "INT"),
        (ExtractOptions, "max_quarantined_share", "value", "NUMBER"),
        (PrepareOptions, "chat_template_kwargs", "mapping", "KEY=VALUE"),
        (EvaluateOptions, "num_draft_tokens", "enumeration", "INT"),
        (EvaluateOptions, "prompts", "list", "TEXT"),
    ],
)
def test_kinds_of_options(model, name, kind, metavar):
    parameter = _parameters(model)[name]
    assert (parameter.kind, parameter.metavar, parameter.positional) == (kind, metavar, False)


def test_positional_options():
    assert _parameters(InspectOptions)["folder"].positional
    run = _parameters(RunOptions)
    assert (run["recipe"].kind, run["overrides"].kind) == ("value", "list")
    assert run["recipe"].positional
    assert run["overrides"].positional


class _Group(Options):
    """`x`: a group."""

    deep: int = opt(1, "Deep.", ge=1)
    names: list[str] = opt([], "Names.")


class _Model(Options):
    """`x`: a model."""

    flag: bool = opt(True, "Flag.")
    choice: Literal["a", "b"] = opt("a", "Choice.")
    maybe: int | None = opt(None, "Maybe.")
    pair: tuple[float, float] = opt((0.5, 0.6), "Pair.")
    mapping: dict[str, float] = opt({}, "Mapping.")
    group: _Group = opt(_Group(), "Group.")


def test_words_become_the_models_values():
    given = {
        "flag": False,
        "choice": "b",
        "maybe": "7",
        "pair": ["1e-1", "2"],
        "mapping": ["x=1e-3", '{"y": 2, "z": 3}', "u=v=w".replace("v=w", "4")],
        "group__deep": "5",
        "group__names": ["n", "m"],
    }
    values = values_of(list(parameters_of(_Model)), given)
    model = build(_Model, values)
    assert (model.flag, model.choice, model.maybe, model.pair) == (False, "b", 7, (0.1, 2.0))
    assert model.mapping == {"x": 0.001, "y": 2.0, "z": 3.0, "u": 4.0}
    assert (model.group.deep, model.group.names) == (5, ["n", "m"])


def test_what_is_not_given_keeps_the_models_default():
    assert values_of(list(parameters_of(_Model)), dict.fromkeys(["flag", "maybe"])) == {}
    assert build(_Model, {}).pair == (0.5, 0.6)


@pytest.mark.parametrize("word", ["novalue", "=3", '{"a": ', "a=[1"])
def test_a_bad_mapping_is_named(word):
    with pytest.raises(UsageError, match="--mapping"):
        values_of(list(parameters_of(_Model)), {"mapping": [word]})


def test_all_wrong_values_are_told_at_once():
    values = values_of(
        list(parameters_of(_Model)), {"maybe": "x", "choice": "c", "group__deep": "0"}
    )
    with pytest.raises(UsageError) as caught:
        build(_Model, values, where="paceline x")
    for name in ("maybe", "choice", "group.deep"):
        assert f"  {name}: " in str(caught.value)


@pytest.mark.parametrize("words", [["2", "30", "58"], ["2,30,58"], ["2, 30", "58"]])
def test_numbers_and_words_of_a_choice_may_be_joined_by_commas(words):
    values = values_of(list(parameters_of(ExtractOptions)), {"layers": words})
    assert build(ExtractOptions, values).layers == [2, 30, 58]


def test_a_comma_in_a_text_stays_in_it():
    values = values_of(list(parameters_of(PrepareOptions)), {"data": ["one, two.jsonl"]})
    assert build(PrepareOptions, values).data == ["one, two.jsonl"]


def test_help_comes_from_the_models_and_tells_defaults():
    shown = " ".join(program("train", "--help").stdout.split())
    for parameter in parameters_of(TrainOptions):
        assert parameter.option in shown
        assert " ".join(parameter.help.split()) in shown
    assert "Peak learning rate. (default: 0.002)" in shown
    assert "AdamW betas. (repeat for several, or join them by commas; default: 0.9 0.95)" in shown


def test_every_verb_is_a_command():
    shown = program("--help").stdout
    names = {"run", "generate", "prepare", "extract", "align", "train", "evaluate", "export"}
    assert names | {"report", "inspect"} <= {command.name for command in COMMANDS}
    for command in COMMANDS:
        assert f"  {command.name} " in shown
