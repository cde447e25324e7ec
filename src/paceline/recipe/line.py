"""A recipe: all stages in one file; and the verbs that read one or look at what it made."""

from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import Field, field_validator, model_validator

from paceline.errors import UsageError
from paceline.recipe.base import CacheOptions, Options, Share, build, opt
from paceline.recipe.data import GenerateOptions, PrepareOptions
from paceline.recipe.drafts import (
    AlignOptions,
    EvaluateOptions,
    ExportOptions,
    ReportOptions,
    TrainOptions,
)
from paceline.recipe.states import ExtractOptions

Stage = Literal["generate", "prepare", "extract", "align", "train", "evaluate", "export", "report"]
STAGES: tuple[str, ...] = get_args(Stage)


class Recipe(Options):
    """`run`: a whole line in one file. Each stage's inputs are the folders before it."""

    run_dir: str = opt("runs/default", "Folder of all stages' folders.")
    target: str = opt("", "The target; see `paceline prepare --help`.")
    revision: str | None = opt(None, "Revision of a Hugging Face id.")
    trust_remote_code: bool = opt(False, "Run the code that the target's repository brings along.")
    overlap: bool = opt(
        False,
        "Train while `extract` still runs, in one process. `extract.stream_bytes` left out: half "
        "of what is free on the disk.",
    )
    prepare: PrepareOptions = Field(default_factory=PrepareOptions)
    generate: GenerateOptions | None = Field(None, description="Left out: data are on-policy.")
    extract: ExtractOptions = Field(default_factory=ExtractOptions)
    align: AlignOptions = Field(default_factory=AlignOptions)
    train: TrainOptions = Field(default_factory=TrainOptions)
    evaluate: EvaluateOptions = Field(default_factory=EvaluateOptions)
    export: ExportOptions = Field(default_factory=ExportOptions)
    report: ReportOptions = Field(default_factory=ReportOptions)

    @model_validator(mode="before")
    @classmethod
    def _empty_groups(cls, values: Any) -> Any:
        """YAML says null where a group's name stands with nothing below it."""
        if not isinstance(values, dict):
            return values
        is_group = lambda name: name in STAGES and name != "generate"
        return {k: v for k, v in values.items() if v is not None or not is_group(k)}


class RecipeOptions(Options):
    """A recipe and what is to differ from it."""

    recipe: str | Recipe = opt("", "Recipe: a YAML file.", positional=True)
    overrides: list[str] = opt(
        [], "Changes to the recipe, such as `train.epochs=2`.", positional=True
    )

    @field_validator("recipe", mode="before")
    @classmethod
    def _of_python(cls, value: Any) -> Any:
        """Built here, its problems are told by its own names."""
        return build(Recipe, value, where="recipe") if isinstance(value, dict) else value


class RunOptions(RecipeOptions):
    """`run`: all stages of a recipe, in order; finished ones are skipped."""

    overwrite_from: Stage | None = opt(
        None,
        "From this stage on, start over where a stage's folder holds other work. What is finished "
        "or unfinished of the work asked for is kept.",
    )


class PlanOptions(RecipeOptions):
    """`plan`: bytes, files, minutes and memory of a recipe, before anything is spent."""

    out: str = opt("", "File for the plan; left out: `plan.json` inside `run_dir`.")
    measure: bool = opt(False, "Run each costly stage on a few samples here, for its real rate.")
    measure_tokens: int = opt(8192, "Tokens that the measured run extracts.", ge=64)
    measure_steps: int = opt(24, "Optimiser steps that the measured run makes.", ge=8)
    sample_rows: int = opt(1000, "Rows of the data that are read closely.", ge=1)
    rows: int | None = opt(None, "Assume so many conversations in place of reading data.", ge=1)
    tokens_per_row: int = opt(1024, "Tokens of each, where `rows` are assumed.", ge=4)
    supervised_share: Share = opt(0.5, "Supervised share of them, where `rows` are assumed.")
    answer_tokens: int | None = opt(
        None,
        "Mean length of the answers that `generate` will write; None: as measured, else the "
        "longest that it allows.",
        ge=1,
    )
    flops: float | None = opt(
        None,
        "Arithmetic of one device, FLOP per second of large matrix products; None: timed here.",
        gt=0,
    )
    devices: int = opt(1, "Devices that share the work of extraction and training.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = opt(
        "auto", "What the stages will run on; auto: what this machine has."
    )
    price_per_hour: float | None = opt(None, "Price of one device for one hour.", ge=0)


class InspectOptions(CacheOptions):
    """`inspect`: what an artefact folder holds, and whether it is whole."""

    folder: str = opt(
        "", "Folder that a stage of paceline wrote, or the URL of a store.", positional=True
    )
    verify: bool = opt(False, "Read everything and compare it with its checksums.")
    sample: str | None = opt(None, "Id of the sample to show decoded; None: the first one.")


class WatchOptions(Options):
    """`watch`: what a running job does: throughput, waits, curves."""

    folder: str = opt("", "Folder of a run, or of one stage.", positional=True)
    once: bool = opt(False, "Show it once, also on a terminal.")
    interval_s: float = opt(2.0, "Seconds between two looks.", gt=0)


class DoctorOptions(Options):
    """`doctor`: what is installed, which engines work, which devices and how much disk there is."""

    folder: str = opt(".", "Folder whose disk is looked at.", positional=True)


def load_recipe(path: str | Path, overrides: list[str] = ()) -> Recipe:
    """Read a YAML recipe and apply dotted overrides such as `train.learning_rate=1e-3`.

    Raises UsageError that names the file, or the override, and every problem in it.
    """
    path = Path(path)
    if not path.is_file():
        is_folder = path.is_dir()
        raise UsageError(f"{path}: {'a folder, not a recipe' if is_folder else 'no such recipe'}")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: a recipe is a mapping of option names")
    return _with_overrides(values, overrides, where=str(path))


def override_recipe(recipe: Recipe, overrides: list[str]) -> Recipe:
    """A recipe with dotted overrides applied; what was left open stays open."""
    return _with_overrides(recipe.model_dump(exclude_unset=True), overrides, where="recipe")


def _with_overrides(values: dict[str, Any], overrides: list[str], where: str) -> Recipe:
    for override in overrides:
        _apply(values, override)
    return build(Recipe, values, where=where)


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise UsageError(f"override {override!r}: write NAME.NAME=VALUE")
    *groups, leaf = name.split(".")
    for group in groups:
        if values.get(group) is None:
            values[group] = {}
        values = values[group]
        if not isinstance(values, dict):
            raise UsageError(f"override {override!r}: {group} is not a group of options")
    try:
        values[leaf] = parse_scalar(text)
    except yaml.YAMLError as error:
        raise UsageError(f"override {override!r}: {text!r} is not a value: {error}") from error


def parse_scalar(text: str) -> Any:
    """A value as YAML says it, numbers such as 1e-3 included."""
    # YAML 1.1 reads 1e-3 as a string; people mean the number.
    try:
        return float(text) if "e" in text.lower() and "." not in text else yaml.safe_load(text)
    except ValueError:
        return yaml.safe_load(text)
