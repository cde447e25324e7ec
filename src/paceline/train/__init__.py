"""`train`: an EAGLE-3 draft from a store of hidden states and a draft vocabulary."""

from paceline.recipe import TrainOptions
from paceline.train.run import run
from paceline.verbs import make_callable

VERB = (TrainOptions, run)
make_callable(__name__)
