"""What all option groups share, and how problems with options are told."""

import difflib
import os
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from paceline.contracts import Overwrite
from paceline.errors import UsageError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# Gradients vanish in float16.
TrainDtype = Literal["auto", "float32", "bfloat16"]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


def _share_or_steps(value: float) -> float:
    if value >= 1 and value % 1:
        raise ValueError("from 1 on these are steps, a whole number; below 1 a share of all steps")
    return value


# As transformers.TrainingArguments has them.
WarmupSteps = Annotated[float, Field(ge=0.0), AfterValidator(_share_or_steps)]


def opt(
    default: Any, doc: str, *, identity: bool = True, positional: bool = False, **constraints: Any
) -> Any:
    """A field with its documentation; `identity=False` keeps it out of what names the work,
    `positional=True` lets it be given without its name."""
    extra = {"identity": identity, "positional": positional}
    return Field(default, description=doc, json_schema_extra=extra, **constraints)


class Options(BaseModel):
    """Base of all option groups: unknown names are errors, documentation is on the field."""

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _paths_are_text(cls, values: Any) -> Any:
        """In Python a file is often a Path; options keep its name."""
        if not isinstance(values, dict):
            return values
        return {name: _as_text(value) for name, value in values.items()}

    def identity(self) -> dict[str, Any]:
        """The options that shape the result, as JSON can say them."""
        shaping = {
            name
            for name, info in type(self).model_fields.items()
            if (info.json_schema_extra or {}).get("identity", True)
        }
        return self.model_dump(mode="json", include=shaping)


def _as_text(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_text(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def positional_options(model: type[Options]) -> list[str]:
    """Names of the options that may be given without their names, in order."""
    return [
        name
        for name, info in model.model_fields.items()
        if (info.json_schema_extra or {}).get("positional")
    ]


class StageOptions(Options):
    """What every stage has."""

    out: str = opt(
        "", "Folder to write; in a recipe, the stage's name inside `run_dir`.", identity=False
    )
    overwrite: Overwrite = opt(
        False,
        "Start over where the folder holds other work, or this work finished; unfinished, it goes "
        "on. In a recipe, and as `other`: for other work alone.",
        identity=False,
    )


class TargetOptions(Options):
    """Which target model."""

    target: str | None = opt(
        None,
        "Local folder, Hugging Face id, or `pkg:PACKAGE/FILE.gguf` inside an installed package. "
        "`generate` and `prepare` need it; later stages take that of their inputs where it is left "
        "out.",
        identity=False,
    )
    revision: str | None = opt(None, "Revision of a Hugging Face id.", identity=False)
    trust_remote_code: bool = opt(
        False, "Run the code that the target's repository brings along.", identity=False
    )


class CacheOptions(Options):
    """Where slices of a store below a URL are kept."""

    cache_dir: str | None = opt(
        None,
        "Folder of the local cache; None: $PACELINE_CACHE, or `paceline` in the user's cache.",
        identity=False,
    )
    cache_bytes: int = opt(
        64 << 30,
        "Bytes of remote stores that are kept; those opened longest ago go first.",
        identity=False,
        ge=1,
    )


def build(model: type[Options], values: dict[str, Any], where: str = "options") -> Any:
    """Validate options; all problems are told in one UsageError, by name."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [f"  {_problem(model, e['loc'], e['type'], _hinted(e))}" for e in error.errors()]
        raise UsageError(f"{where}:\n" + "\n".join(lines)) from error


def _hinted(error: ErrorDetails) -> str:
    """A list of one is often written as the one."""
    given = error["input"]
    is_one = error["type"] == "list_type" and isinstance(given, str | int | float)
    return f"write a list: [{given}]" if is_one else error["msg"]


def _problem(model: type[Options], place: tuple[int | str, ...], kind: str, text: str) -> str:
    name = ".".join(map(str, place))
    if kind != "extra_forbidden":
        text = text.removeprefix("Value error, ")
        # What is wrong with several options together names them itself.
        return f"{name}: {text}" if name else text
    known = _options_at(model, place[:-1])
    close = difflib.get_close_matches(str(place[-1]), known, n=1)
    return f"{name}: no such option" + (f"; did you mean {close[0]}?" if close else "")


def _options_at(model: type[Options], place: tuple[int | str, ...]) -> list[str]:
    """Names of the options of the group at `place`, a path of group names."""
    for name in place:
        kind = model.model_fields[str(name)].annotation
        # A group that may be left out is a union of its model and None.
        model = next(t for t in (kind, *get_args(kind)) if isinstance(t, type))
    return list(model.model_fields)
