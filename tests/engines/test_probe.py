"""The probe on real vLLM: passes a right target, stops one that agrees with itself and is wrong."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from paceline.errors import ProbeFailure, TargetError
from paceline.extract.probe import ProbeResult, choose_prompts, run_probe
from paceline.extract.vllm.engine import VllmEngine
from paceline.store import StoreSpec
from paceline.target.layers import plan_layers
from paceline.target.model import load_model
from paceline.target.spec import Target, TargetReference
from tests.engines.common import PLAN, WIDTH, mixed_samples
from tests.engines.models import NUM_LAYERS as TINY_LAYERS
from tests.engines.models import VOCAB, engine_of, make
from tests.engines.models import WIDTH as TINY_WIDTH
from tests.engines.versions import runs_in_one_process

pytestmark = pytest.mark.engine_vllm

# transformers 5 is beside the newest vLLM, transformers 4 beside 0.16.
NEWEST = int(transformers.__version__.split(".")[0]) >= 5


@pytest.mark.parametrize("reference_layers", [30, 4])
def test_a_right_target_passes(
    reference_layers: int, engine: VllmEngine, target: Target, tmp_path: Path
) -> None:
    prompts = choose_prompts(mixed_samples(8, longest=120), 4)
    spec = StoreSpec(PLAN, WIDTH, "float32")
    found = run_probe(engine, target, spec, prompts, tmp_path, reference_layers)
    assert found.num_greedy_agree == found.num_greedy_rows >= 64
    compared = PLAN.all if reference_layers == 30 else (0, 2, 4)
    assert list(found.errors) == [f"k={k}" for k in compared]
    assert max(error["max"] for error in found.errors.values()) <= 5e-4


@pytest.mark.skipif(
    not runs_in_one_process(), reason="of the builds in the middle no wrong target is known"
)
def test_a_target_that_vllm_runs_wrong_is_stopped(own_processes: None, tmp_path: Path) -> None:
    """What the CPU builds are known to run wrong without a word: 0.16 loses the theta that
    transformers 5 writes, 0.32 has MLA with plain rotary positions wrong."""
    if NEWEST:
        name, (target, _) = "deepseek_v3", make("deepseek_v3", tmp_path, rope_parameters=_PLAIN)
        served = target
    else:
        name, (target, folder) = "llama", make("llama", tmp_path, rope_theta=500000.0)
        served = Target(TargetReference(str(_with_lost_theta(folder, tmp_path / "lost"))))
    # The first agrees with itself: only the outside look tells. The second does not even do that.
    told = r"own greedy token is not" if NEWEST else r"layer k = \d differs from a plain"
    engine = engine_of(name, served, tmp_path)
    try:
        for reference_layers in (TINY_LAYERS, 2):
            with pytest.raises(ProbeFailure, match=told):
                _probe(engine, target, tmp_path / f"stopped-{reference_layers}", reference_layers)
        if not NEWEST:
            waived = _probe(engine, target, tmp_path / "waived", reference_layers=0)
            assert waived.errors is None
    finally:
        engine.close()


def test_a_config_that_this_transformers_would_misread_is_refused(tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path, **({} if NEWEST else {"rope_theta": 500000.0}))
    lost = Target(TargetReference(str(_with_lost_theta(folder, tmp_path / "lost"))))
    if NEWEST:
        assert lost.config.rope_parameters["rope_theta"] == 500000.0
    else:
        with pytest.raises(TargetError, match="`rope_parameters`, which transformers 4"):
            _ = lost.config


def test_the_plain_forward_is_soft_capped_where_the_target_is(tmp_path: Path) -> None:
    # The transformers beside some vLLM runs Gemma 2 in fused attention, without its soft-capping.
    target, folder = make("gemma2", tmp_path, attn_logit_softcapping=5.0)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.arange(5, 60)[None]
    with torch.inference_mode():
        wanted = plain(ids).logits
        assert torch.equal(load_model(target, torch.float32, "cpu")(ids).logits, wanted)


_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def _with_lost_theta(folder: Path, copy: Path) -> Path:
    """The same target with a config as transformers 5 saves it."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config.pop("rope_theta", None)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def _probe(engine: VllmEngine, target: Target, scratch: Path, reference_layers: int) -> ProbeResult:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(5, VOCAB, 40).astype(np.int32) for _ in range(4)]
    spec = StoreSpec(plan_layers([1, 2, 5], TINY_LAYERS), TINY_WIDTH, "float32")
    return run_probe(engine, target, spec, prompts, scratch, reference_layers)
