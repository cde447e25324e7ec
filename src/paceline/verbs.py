"""Makes a stage's module callable: `paceline.extract(...)` runs what `paceline.extract` holds.

A verb is a folder (or file) and a function of one name. Python lets a module's class be changed
to a subclass of ModuleType (Data model, "Customizing module attribute access"); this is that.
"""

import sys
from types import ModuleType
from typing import Any

from paceline.recipe import Options, build


class _Verb(ModuleType):
    """A module with a `VERB = (options model, run function)`; calling it runs the stage."""

    VERB: tuple[type[Options], Any]

    def __call__(self, options: Options | None = None, /, **values: Any) -> dict[str, Any]:
        model, run = self.VERB
        if options is None:
            options = build(model, values, where=self.__name__)
        elif values:
            options = build(model, {**options.model_dump(), **values}, where=self.__name__)
        return run(options)


def make_callable(module_name: str) -> None:
    """Call at the end of a stage's module, after `VERB` is set."""
    sys.modules[module_name].__class__ = _Verb
