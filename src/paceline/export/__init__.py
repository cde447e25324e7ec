"""`paceline.export(...)`: a draft as vLLM and SGLang load it, re-loaded and replayed."""

from paceline.export.run import run
from paceline.export.verify import verify_exported
from paceline.forms.load import load_exported
from paceline.recipe import ExportOptions
from paceline.verbs import make_callable

__all__ = ["load_exported", "run", "verify_exported"]

VERB = (ExportOptions, run)

make_callable(__name__)
