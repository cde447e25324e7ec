"""`report`: one self-contained HTML page about a run."""

from paceline.recipe import ReportOptions
from paceline.report.run import run
from paceline.verbs import make_callable

VERB = (ReportOptions, run)
make_callable(__name__)
