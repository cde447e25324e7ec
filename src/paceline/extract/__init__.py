"""`extract`: verified hidden states of chosen layers into a store."""

from paceline.extract.run import run
from paceline.recipe import ExtractOptions
from paceline.verbs import make_callable

VERB = (ExtractOptions, run)
make_callable(__name__)
