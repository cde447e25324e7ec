"""Recipes: YAML in, dotted overrides, every problem told at once."""

import inspect
import math
import pydoc
import re
from pathlib import Path

import pytest
import yaml

import paceline
from paceline.errors import UsageError
from paceline.recipe import (
    STAGES,
    EvaluateOptions,
    ExtractOptions,
    InspectOptions,
    Options,
    PlanOptions,
    PrepareOptions,
    Recipe,
    RunOptions,
    TrainOptions,
    build,
    load_recipe,
    override_recipe,
    parse_scalar,
    positional_options,
)

ROOT = Path(__file__).parent.parent


def _write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_a_recipe_and_its_overrides(tmp_path):
    path = _write(tmp_path, "target: t\ntrain: {epochs: 2, draft: {num_layers: 2}}\n")
    recipe = load_recipe(
        path,
        [
            "train.learning_rate=1e-3",
            "train.draft.qk_norm=true",
            "evaluate.num_draft_tokens=[2, 4]",
            "generate.max_new_tokens=9",
            "target=/models/x",
        ],
    )
    assert recipe.target == "/models/x"
    assert (recipe.train.epochs, recipe.train.learning_rate) == (2.0, 0.001)
    assert (recipe.train.draft.num_layers, recipe.train.draft.qk_norm) == (2, True)
    assert recipe.evaluate.num_draft_tokens == [2, 4]
    assert recipe.generate is not None
    assert recipe.generate.max_new_tokens == 9


def test_all_problems_stand_in_one_message(tmp_path):
    path = _write(
        tmp_path,
        "targt: x\nprepare: {data: chats.jsonl}\n"
        "train: {epochss: 2, ttt_steps: 0, draft: {num_layerz: 1}}\n"
        "generate: {max_tokens: 3}\nevaluate: {num_draft_tokens: [0]}\nexport: {server: [tgi]}\n",
    )
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    message = str(caught.value)
    for expected in (
        str(path),
        "targt: no such option; did you mean target?",
        "train.epochss: no such option; did you mean epochs?",
        "prepare.data: write a list: [chats.jsonl]",
        "train.ttt_steps: Input should be greater than or equal to 1",
        "train.draft.num_layerz: no such option; did you mean num_layers?",
        "generate.max_tokens: no such option",
        "evaluate: num_draft_tokens: give chain lengths of 1 or more",
        "export.server.0: ",
    ):
        assert expected in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "is not YAML"),
        ("- 1\n- 2\n", "a recipe is a mapping"),
        ("\xff".encode("latin-1"), "is not YAML"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, text, says):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=says):
        load_recipe(path)


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="no such recipe"):
        load_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.epochs", "write NAME.NAME=VALUE"),
        ("=3", "write NAME.NAME=VALUE"),
        ("target.x=3", "target is not a group"),
        ("train.betas=[1", "is not a value"),
        ("train.epoch=3", "did you mean epochs"),
    ],
)
def test_a_wrong_override_is_named(tmp_path, override, says):
    path = _write(tmp_path, "target: t\n")
    with pytest.raises(UsageError, match=says):
        load_recipe(path, [override])


def test_an_empty_group_takes_overrides(tmp_path):
    recipe = load_recipe(_write(tmp_path, "target: t\ngenerate:\n"), ["generate.seed=3"])
    assert recipe.generate is not None
    assert recipe.generate.seed == 3


def test_groups_with_nothing_below_their_names_are_empty(tmp_path):
    named = [name for name in Recipe.model_fields if name in STAGES]
    recipe = load_recipe(_write(tmp_path, "target: t\n" + "".join(f"{n}:\n" for n in named)))
    assert recipe.generate is None
    assert recipe == build(Recipe, {"target": "t"})


@pytest.mark.parametrize("verb", [RunOptions, PlanOptions])
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"targt": "x"}, "targt: no such option; did you mean target?"),
        ({"train": {"epochss": 2}}, "train.epochss: no such option; did you mean epochs?"),
        (
            {"train": {"draft": {"num_layerz": 2}}},
            "train.draft.num_layerz: no such option; did you mean num_layers?",
        ),
    ],
    ids=["recipe", "stage", "group"],
)
def test_a_wrong_name_in_a_recipe_of_python_is_told(verb, values, says):
    with pytest.raises(UsageError) as caught:
        build(verb, {"recipe": values})
    assert str(caught.value) == f"recipe:\n  {says}"


def test_paths_of_python_are_taken_for_their_names():
    recipe = build(
        Recipe,
        {
            "target": Path("/models/t"),
            "prepare": {"data": [Path("a.jsonl"), "b.jsonl"]},
            "evaluate": {"prompts": (Path("q.jsonl"),), "mode": "decode"},
        },
    )
    assert recipe.target == "/models/t"
    assert recipe.prepare.data == ["a.jsonl", "b.jsonl"]
    assert recipe.evaluate.prompts == ["q.jsonl"]
    assert build(PrepareOptions, {"out": Path("o")}).out == "o"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"betas": [0.9, 1.0]}, "betas.1"),
        ({"betas": [-0.1, 0.9]}, "betas.0"),
        ({"betas": [math.nan, 0.9]}, "betas.0"),
        ({"learning_rate": math.inf}, "learning_rate"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"epochs": math.inf}, "epochs"),
        ({"epochs": math.nan}, "epochs"),
        ({"max_grad_norm": math.nan}, "max_grad_norm"),
        ({"dtype": "float16"}, "dtype"),
    ],
    ids=str,
)
def test_values_that_nothing_can_be_trained_with_are_refused_by_name(values, name):
    with pytest.raises(UsageError, match=rf"\n  {name}: Input should"):
        build(TrainOptions, values)


def test_gradients_need_not_be_clipped():
    identity = build(TrainOptions, {"max_grad_norm": math.inf}).identity()
    assert identity["max_grad_norm"] == math.inf


def test_overrides_on_a_recipe_object_leave_it_alone():
    recipe = build(Recipe, {"target": "t", "train": {"epochs": 3}})
    changed = override_recipe(recipe, ["train.seed=5"])
    assert (changed.train.seed, changed.train.epochs, changed.target) == (5, 3.0, "t")
    assert recipe.train.seed == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("2E4", 20000.0), ("true", True), ("3", 3), ("1.5e-3", 0.0015)]
    + [("[1, 2]", [1, 2]), ("text", "text"), ("null", None), ("element", "element")],
)
def test_scalars_as_people_mean_them(text, value):
    found = parse_scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_identity_leaves_out_what_only_says_how_fast_or_where():
    identity = build(TrainOptions, {"store": "s", "out": "o", "device": "cpu"}).identity()
    assert not {"store", "out", "device", "log_every", "overwrite", "target"} & identity.keys()
    assert {"learning_rate", "draft", "seed", "ttt_steps"} <= identity.keys()
    assert identity["betas"] == [0.9, 0.95]
    assert "layers" in build(ExtractOptions, {}).identity()


def _models() -> list[type[Options]]:
    found, todo = [], [Options]
    while todo:
        model = todo.pop()
        found.append(model)
        todo += model.__subclasses__()
    return found


def test_every_option_is_documented():
    bare = [
        f"{model.__name__}.{name}"
        for model in _models()
        if model is not Recipe  # its groups are documented by their models
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert bare == []


def test_options_by_position():
    assert positional_options(InspectOptions) == ["folder"]
    assert positional_options(RunOptions) == ["recipe", "overrides"]
    assert positional_options(EvaluateOptions) == []


def test_a_verb_refuses_more_values_than_it_has_places(tmp_path):
    says = r"^paceline.inspect: values without a name: 2 given, 1 \(folder\) taken"
    with pytest.raises(UsageError, match=says):
        paceline.inspect(str(tmp_path), "x")
    with pytest.raises(UsageError, match="^paceline.train: values without a name: 1 given, none"):
        paceline.train("runs/x/extract")


@pytest.mark.parametrize(
    ("verb", "options", "says"),
    [
        ("extract", {"workers": 2}, "workers: engine transformers is one; say `engine` vllm"),
        ("extract", {"ray_address": "auto"}, "ray_address: engine transformers is one"),
        ("generate", {"server": "http://x/v1"}, "server: engine transformers asks none"),
        ("generate", {"server": "http://x/v1", "engine": "vllm"}, "server: engine vllm asks none"),
    ],
)
def test_options_of_another_engine_are_refused(verb, options, says):
    with pytest.raises(UsageError, match=f"^paceline.{verb}:\n  {says}"):
        getattr(paceline, verb)(**options)


@pytest.mark.parametrize("name", paceline.__all__)
def test_help_shows_the_options_of_a_verb(name):
    verb = getattr(paceline, name)
    shown = pydoc.plaintext.document(verb)
    for option in inspect.signature(verb).parameters:
        assert re.search(rf"^    {option}( = |\.)", shown, flags=re.M), option


def test_help_says_what_an_option_is_and_may_be():
    shown = " ".join(pydoc.plaintext.document(paceline.train).split())
    says = "optimiser = 'adamw' adamw, or muon for the matrices"
    assert says in shown and "One of 'adamw', 'muon'." in shown
    assert "draft.num_layers = 1 Decoder layers." in shown
    assert "One of 'tensorboard', 'wandb', 'trackio'." in shown and "'other'." not in shown


def test_what_options_together_are_refused_for_names_no_class():
    says = "^paceline.evaluate:\n  prompts: modes decode and served ask them"
    with pytest.raises(UsageError, match=says):
        paceline.evaluate(prompts=["x.jsonl"])


def test_recipes_of_the_documentation_are_valid(tmp_path):
    pages = [*sorted(ROOT.glob("docs/*.md")), *ROOT.glob("README.md")]
    blocks = [
        (page.name, block)
        for page in pages
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.S)
        if "run_dir:" in block
    ]
    assert "run.md" in {name for name, _ in blocks}
    for _, block in blocks:
        assert load_recipe(_write(tmp_path, block)).target


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda p: p.name)
def test_shipped_recipes_are_valid(path):
    recipe = load_recipe(path)
    assert recipe.target
    # What a recipe says is what it means: no option is spelt in a way that YAML reads otherwise.
    for stage, values in yaml.safe_load(path.read_text()).items():
        if isinstance(values, dict):
            group = getattr(recipe, stage).model_dump(mode="json")
            for name, value in values.items():
                if not isinstance(value, dict):
                    assert group[name] == value, f"{stage}.{name}"
