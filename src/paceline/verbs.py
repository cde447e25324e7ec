"""Makes a stage's module callable: `paceline.extract(...)` runs what `paceline.extract` holds.

A verb is a folder (or file) and a function of one name. Python lets a module's class be changed
to a subclass of ModuleType (Data model, "Customizing module attribute access"); this is that.
"""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from paceline.errors import UsageError
from paceline.recipe import Options, build, positional_options


class _Verb(ModuleType):
    """A module with a `VERB = (options model, run function)`; calling it runs the stage."""

    VERB: tuple[type[Options], Any]

    def __call__(self, *given: Any, **values: Any) -> dict[str, Any]:
        """Run with an options object, or with options by name (a few also by position)."""
        model, run = self.VERB
        # As users call it, wherever its file lies.
        where = f"paceline.{self.__name__.rpartition('.')[2]}"
        if given and isinstance(given[0], model):
            values = {**given[0].model_dump(), **values}
        else:
            values |= _by_position(model, given, where)
        return run(build(model, values, where=where))

    @property
    def __doc__(self) -> str:
        """For `help`: the module's own words, then each option; made when somebody asks."""
        options = "\n".join(_described(self.VERB[0]))
        own = vars(self).get("__doc__") or ""
        return f"{own}\n\nOptions, by name, with their defaults:\n\n{options}\n"

    @property
    def __signature__(self) -> inspect.Signature:
        """For `inspect.signature`, and what shows it (`paceline.train?`): the options, by name."""
        model = self.VERB[0]
        by_position = positional_options(model)
        found = inspect.signature(model).parameters
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        first = [found[name].replace(kind=either) for name in by_position if name in found]
        rest = [p for name, p in found.items() if name not in by_position]
        return inspect.Signature([*first, *rest])


def _by_position(model: type[Options], given: tuple[Any, ...], where: str) -> dict[str, Any]:
    names = positional_options(model)
    if len(given) > len(names):
        taken = f"{len(names)} ({', '.join(names)})" if names else "none"
        raise UsageError(
            f"{where}: values without a name: {len(given)} given, {taken} taken; write NAME=VALUE"
        )
    return dict(zip(names, given, strict=False))


def _described(model: type[Options], path: str = "") -> Iterator[str]:
    """For `help`: each option with its default and what it is; those of a group by dotted names."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Options):
            yield from _described(kind, f"{path}{name}.")
            continue
        about = field.description or ""
        if choices := _choices(kind):
            about += f" One of {', '.join(map(repr, choices))}."
        default = field.get_default(call_default_factory=True)
        text = textwrap.fill(about, 92, initial_indent="    ", subsequent_indent="    ")
        yield f"{path}{name} = {default!r}\n{text}"


def _choices(kind: Any) -> list[str]:
    """The words that an option, or each of its values, may be; none where it may be others too."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    inner = get_args(kind)
    return [] if bool in inner else [word for part in inner for word in _choices(part)]


def make_callable(module_name: str) -> None:
    """Call at the end of a stage's module, after `VERB` is set."""
    sys.modules[module_name].__class__ = _Verb
