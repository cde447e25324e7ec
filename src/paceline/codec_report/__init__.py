"""`codec-report`: what each codec costs on real states of a real target."""

from paceline.codec_report.run import run
from paceline.recipe import CodecReportOptions
from paceline.verbs import make_callable

VERB = (CodecReportOptions, run)
make_callable(__name__)
