"""How vLLM is started. No vLLM."""

import json
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.dataset import TokenDataset
from paceline.extract.guards import unusable
from paceline.extract.vllm.settings import context_environment, context_length
from paceline.recipe import ExtractOptions
from paceline.target.spec import Target, TargetReference
from tests.targets import save_target

POSITIONS = 512  # of the tiny target
LONG = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


@pytest.mark.parametrize(
    ("max_length", "context", "environment"),
    [
        pytest.param(100, 512, {}, id="short data: room for the probe"),
        pytest.param(511, 512, {}, id="one less than the target has positions"),
        pytest.param(512, 513, LONG, id="all positions of the target"),
        pytest.param(600, 513, LONG, id="more than it has"),
    ],
)
def test_what_is_usable_fits_into_the_context_with_the_sampled_token(
    max_length: int, context: int, environment: dict[str, str], tmp_path: Path
) -> None:
    save_target(tmp_path / "target")
    rng = np.random.default_rng(0)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i, length in enumerate([30, 100, 511, 512, 600]):
            ids = rng.integers(4, 260, length).tolist()
            row = {"id": f"row-{i}", "prompt_ids": ids[:10], "response_ids": ids[10:]}
            file.write(json.dumps(row) + "\n")
    paceline.prepare(
        target=str(tmp_path / "target"),
        data=[str(tmp_path / "rows.jsonl")],
        out=str(tmp_path / "prepare"),
        heldout_share=0.0,
        max_length=max_length,
    )
    target = Target(TargetReference(str(tmp_path / "target")))
    options = ExtractOptions(data=str(tmp_path / "prepare"))
    found = context_length(options, target)
    assert found == context
    assert context_environment(target, found) == environment
    samples = list(TokenDataset(tmp_path / "prepare"))
    longest = max(s.num_tokens for s in samples if unusable(s, target) is None)
    assert longest == min(max_length, POSITIONS)
    assert longest + 1 <= found
