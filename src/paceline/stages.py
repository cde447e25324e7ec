"""From a recipe to each stage's options: folders and target filled in, in the order of the work."""

import json
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.recipe import (
    Recipe,
    RecipeOptions,
    StageOptions,
    TargetOptions,
    build,
    load_recipe,
    override_recipe,
)

# What `run` and `plan` leave in a run's folder, and the page reads.
TIMES_FILE, PLAN_FILE = "run.json", "plan.json"


def read_kept(path: Path, *keys: str) -> dict[str, Any] | None:
    """What one of those files holds; None where it is missing. Raises UsageError where it is not
    JSON, or not an object that has these keys."""
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        for key in keys:
            values[key]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is damaged ({type(error).__name__}: {error}): remove it"
        ) from error
    return values


def recipe_of(options: RecipeOptions) -> Recipe:
    """The recipe that the options name or hold, with their overrides. Raises UsageError."""
    if isinstance(options.recipe, Recipe):
        return override_recipe(options.recipe, options.overrides)
    if options.recipe:
        return load_recipe(options.recipe, options.overrides)
    raise UsageError("pass `recipe`, a YAML file; docs/run.md shows one")


def plan_stages(recipe: Recipe) -> dict[str, StageOptions]:
    """Each stage's options with its folders and target filled in, in the order of the work.

    What the recipe says itself stays as it is.
    """
    if not recipe.target:
        raise UsageError("recipe: no `target`: a folder, a Hub id or pkg:PACKAGE/FILE")
    if recipe.generate and recipe.prepare.data:
        raise UsageError(
            "recipe: `generate` and `prepare.data` are both given. With `generate`, prepare reads "
            "the answers: name the conversations as `generate.data`."
        )
    folder = Path(recipe.run_dir)

    def at(stage: str) -> str:
        given: StageOptions | None = getattr(recipe, stage)
        return (given.out if given else "") or str(folder / stage)

    links: dict[str, dict[str, Any]] = {
        "generate": {},
        "prepare": {"data": [at("generate")]} if recipe.generate else {},
        "align": {"data": at("prepare")},
        "extract": {"data": at("prepare")},
        "train": {"store": at("extract"), "vocab": at("align"), "follow": recipe.overlap},
        "evaluate": {"draft": at("train"), "store": at("extract"), "data": at("prepare")},
        "export": {"draft": at("train"), "evaluate": at("evaluate")},
        "report": {"run_dir": str(folder)},
    }
    planned = {}
    for stage, inputs in links.items():
        given: StageOptions | None = getattr(recipe, stage)
        if given is not None:
            planned[stage] = _filled(recipe, given, {"out": at(stage), **inputs})
    return planned


def _filled(recipe: Recipe, given: StageOptions, links: dict[str, Any]) -> StageOptions:
    values = given.model_dump()
    if isinstance(given, TargetOptions) and not given.target:
        links |= {name: getattr(recipe, name) for name in TargetOptions.model_fields}
    values.update({name: link for name, link in links.items() if not values[name]})
    return build(type(given), values, where="recipe")
