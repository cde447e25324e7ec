"""`evaluate`: acceptance length of a draft, with its definition, intervals and baselines."""

from paceline.evaluate.run import run
from paceline.recipe import EvaluateOptions
from paceline.verbs import make_callable

VERB = (EvaluateOptions, run)
make_callable(__name__)
