"""paceline: from a target model and chat data to an EAGLE-3 draft that vLLM and SGLang serve.

One function per verb, each with the options of its model in `paceline.recipe`; loaded when used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Verbs whose module is callable itself, and those that are a function inside a module.
_MODULES = (
    "prepare",
    "extract",
    "align",
    "train",
    "evaluate",
    "export",
    "report",
    "inspect",
    "codec_report",
    "doctor",
    "plan",
    "run",
    "watch",
)
_FUNCTIONS = {
    "generate": "paceline.prepare.generate",
    "replay": "paceline.train.replay",
    "import_store": "paceline.exchange.import_store",
    "export_store": "paceline.exchange.export_store",
    "merge_stores": "paceline.housekeeping.merge_stores",
    "subset_store": "paceline.housekeeping.subset_store",
    "delete_samples": "paceline.housekeeping.delete_samples",
    "upgrade_store": "paceline.housekeeping.upgrade_store",
    "upload_store": "paceline.housekeeping.upload_store",
}

__all__ = [*_MODULES, *_FUNCTIONS]


def __dir__() -> list[str]:
    """Verbs are loaded when used; a prompt that completes names is to show them before."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"paceline.{name}")
    if name in _FUNCTIONS:
        return importlib.import_module(_FUNCTIONS[name])
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
