"""From the options to a running vLLM engine, or to several that share the work."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from paceline.errors import EngineError, UsageError
from paceline.extract.engine import Engine
from paceline.extract.vllm.engine import VllmEngine
from paceline.extract.vllm.local_hosts import launch_local, share_devices
from paceline.extract.vllm.replicas import Launcher, ReplicaPool
from paceline.extract.vllm.settings import (
    VllmSettings,
    batched_tokens,
    context_environment,
    context_length,
    llm_arguments,
)
from paceline.recipe import ExtractOptions
from paceline.target.layers import plan_layers
from paceline.target.model import num_parameters
from paceline.target.spec import Target, long_rope_from
from paceline.vllm_process import set_environment

# A step may wait for its writers, and they for a training that makes room in a byte budget; vLLM
# would give up a step of several ranks after five minutes.
_PATIENT_ENVIRONMENT = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(7 * 24 * 3600)}


def open_engine(options: ExtractOptions, target: Target, dtype: str, scratch: Path) -> Engine:
    """One vLLM engine, or `workers` of them; see `extract.engine.open_engine`."""
    settings = vllm_settings(options, target, dtype, scratch)
    # Processes that are started here inherit it.
    set_environment(settings.environment)
    if options.workers == 1 and options.ray_address is None:
        engine = VllmEngine(settings, target.num_layers, dtype)
        try:
            if engine.in_this_process and not options.waive_reference:
                _check_transformers(target)
        except BaseException:
            engine.close()
            raise
        return engine
    per_worker = settings.arguments.get("tensor_parallel_size", 1) * settings.arguments.get(
        "pipeline_parallel_size", 1
    )
    if options.ray_address is not None:
        return _ray_pool(options, settings, target, dtype, per_worker)
    launch = _local_launcher(options.workers, per_worker, _on_cpu())
    return ReplicaPool(options.workers, launch, settings, target.num_layers, dtype)


def _check_transformers(target: Target) -> None:
    """transformers' own model of the target can still be built here, which the probe needs.

    vLLM runs some families through transformers' classes, and newer releases change those for good
    in the process that has the model.
    """
    try:
        num_parameters(target)
    except AssertionError as error:
        raise EngineError(
            "vLLM runs this target through transformers' own classes, and has changed them in this "
            f"process, so that the probe cannot use them ({error}). Unset "
            "VLLM_ENABLE_V1_MULTIPROCESSING: vLLM then has a process of its own"
        ) from error


def vllm_settings(
    options: ExtractOptions, target: Target, dtype: str, scratch: Path
) -> VllmSettings:
    """How to start vLLM for these options."""
    plan = plan_layers(options.layers, target.num_layers, options.layer_convention)
    row_bytes = len(plan.all) * target.hidden_size * getattr(torch, dtype).itemsize
    wanted = dict(options.engine_options)
    environment = dict(_PATIENT_ENVIRONMENT) if options.stream_bytes else {}
    if "max_model_len" not in wanted and (longest := context_length(options, target)):
        wanted["max_model_len"] = longest
        environment |= context_environment(target, longest)
    _refuse_mixed_rope(options, target, wanted.get("max_model_len"))
    tokens = batched_tokens(options, _on_cpu(), row_bytes)
    arguments = llm_arguments(target, dtype, wanted, tokens)
    return VllmSettings(arguments, scratch, environment=environment)


def _refuse_mixed_rope(options: ExtractOptions, target: Target, length: int | None) -> None:
    original = long_rope_from(target)
    if original and length and length > original and not options.waive_reference:
        raise UsageError(
            f"with max_model_len {length} vLLM runs every sample of this target with the long "
            f"factors of its LongRoPE, which transformers keeps for samples of more than "
            f"{original} tokens. Run `prepare` with max_length {original - 1} at most, or use "
            "engine transformers; for a draft that is served with a longer context than "
            f"{original}, where vLLM does the same, pass waive_reference."
        )


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _local_launcher(count: int, per_worker: int, on_cpu: bool) -> Launcher:
    devices = [None] * count if on_cpu else share_devices(count, per_worker)

    def launch(number: int, port: int, key: bytes):
        return launch_local(number, port, key, devices[number])

    return launch


def _ray_pool(
    options: ExtractOptions, settings: VllmSettings, target: Target, dtype: str, per_worker: int
) -> ReplicaPool:
    from paceline.extract.vllm.ray_hosts import connect, launch_ray

    address = connect(options.ray_address)
    gpus = 0 if _on_cpu() else per_worker
    launch = partial(launch_ray, gpus=gpus, environment=settings.environment)
    # A folder of this machine is none of another's.
    settings = replace(settings, scratch=None)
    return ReplicaPool(options.workers, launch, settings, target.num_layers, dtype, address)
