"""From the options to a running vLLM engine."""

from pathlib import Path

import torch

from paceline.extract.vllm.engine import VllmEngine
from paceline.extract.vllm.settings import (
    VllmSettings,
    batched_tokens,
    context_length,
    llm_arguments,
)
from paceline.recipe import ExtractOptions
from paceline.target.layers import plan_layers
from paceline.target.spec import Target


def vllm_settings(
    options: ExtractOptions, target: Target, dtype: str, scratch: Path
) -> VllmSettings:
    """How to start vLLM for these options."""
    from vllm.platforms import current_platform

    plan = plan_layers(options.layers, target.num_layers, options.layer_convention)
    row_bytes = len(plan.all) * target.hidden_size * getattr(torch, dtype).itemsize
    wanted = dict(options.engine_options)
    if "max_model_len" not in wanted and (longest := context_length(options, target)):
        wanted["max_model_len"] = longest
    tokens = batched_tokens(options, target, current_platform.is_cpu(), row_bytes)
    return VllmSettings(llm_arguments(target, dtype, wanted, tokens), scratch)


def open_engine(options: ExtractOptions, target: Target, dtype: str, scratch: Path) -> VllmEngine:
    """One vLLM engine, or several that share the work (`workers`)."""
    return VllmEngine(vllm_settings(options, target, dtype, scratch), target.num_layers, dtype)
