"""Extraction through vLLM, 0.16 to 0.32. Nothing else in paceline touches vLLM's internals."""

from pathlib import Path

from paceline.extract.vllm.step import step
from paceline.recipe import ExtractOptions
from paceline.target.spec import Target

__all__ = ["open_engine", "step"]


def open_engine(options: ExtractOptions, target: Target, dtype: str, scratch: Path):
    """One vLLM engine, or several that share the work (`workers`)."""
    from paceline.extract.vllm.opening import open_engine as open_vllm

    return open_vllm(options, target, dtype, scratch)
