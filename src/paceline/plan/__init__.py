"""`plan`: bytes, files, minutes and memory of a recipe, before anything is spent."""

from paceline.plan.run import run
from paceline.recipe import PlanOptions
from paceline.verbs import make_callable

VERB = (PlanOptions, run)
make_callable(__name__)
