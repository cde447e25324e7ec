"""`paceline evaluate`: prints acceptance lengths beside the baselines, with their definition."""

from typing import Any

from paceline.cli.acceptance import show_acceptance
from paceline.cli.command import Command
from paceline.recipe import EvaluateOptions


def problems(result: dict[str, Any]) -> list[str]:
    """In float32 decoding with a draft must give the target's own greedy tokens, but where two are
    as likely as rounding can tell; half precision rounds far more, so there it is told and not
    judged."""
    lossless = result.get("lossless")
    if not lossless or result["dtype"] != "float32":
        return []
    if lossless["equal_outputs"] + lossless["near_ties"] == lossless["outputs"]:
        return []
    return [
        f"evaluate: {lossless['equal_outputs']:,} of {lossless['outputs']:,} outputs equal the "
        f"target's own greedy ones, and only {lossless['near_ties']:,} others differ at a near "
        "tie: the decoding is not lossless"
    ]


COMMAND = Command("evaluate", EvaluateOptions, "paceline.evaluate", show_acceptance, problems)
