"""The verb `prepare`: conversations to a token data set with an exact loss mask."""

from paceline.prepare.run import run
from paceline.recipe import PrepareOptions
from paceline.verbs import make_callable

VERB = (PrepareOptions, run)

make_callable(__name__)
