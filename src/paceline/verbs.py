"""Makes a stage's module callable: `paceline.extract(...)` runs what `paceline.extract` holds.

A verb is a folder (or file) and a function of one name. Python lets a module's class be changed
to a subclass of ModuleType (Data model, "Customizing module attribute access"); this is that.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from paceline.errors import UsageError
from paceline.recipe import Options, build, positional_options


class _Verb(ModuleType):
    """A module with a `VERB = (options model, run function)`; calling it runs the stage."""

    VERB: tuple[type[Options], Any]

    def __call__(self, *given: Any, **values: Any) -> dict[str, Any]:
        """Run with an options object, or with options by name (a few also by position)."""
        model, run = self.VERB
        if given and isinstance(given[0], model):
            values = {**given[0].model_dump(), **values}
        else:
            values |= _by_position(model, given, self.__name__)
        return run(build(model, values, where=self.__name__))

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


def make_callable(module_name: str) -> None:
    """Call at the end of a stage's module, after `VERB` is set."""
    sys.modules[module_name].__class__ = _Verb
