"""`paceline evaluate`: prints acceptance lengths beside the baselines, with their definition."""

from typing import Any

from paceline.cli.acceptance import show_acceptance
from paceline.cli.command import Command
from paceline.recipe import EvaluateOptions


def problems(result: dict[str, Any]) -> list[str]:
    """In float32 speculative decoding must give the target's own greedy tokens; half precision
    rounds otherwise in other shapes, so there it is told and not judged."""
    lossless = result.get("lossless")
    if not lossless or result["dtype"] != "float32":
        return []
    if lossless["equal_outputs"] == lossless["outputs"]:
        return []
    return [
        f"evaluate: {lossless['equal_outputs']:,} of {lossless['outputs']:,} outputs equal the "
        "target's own greedy ones: the decoding is not lossless"
    ]


COMMAND = Command("evaluate", EvaluateOptions, "paceline.evaluate", show_acceptance, problems)
