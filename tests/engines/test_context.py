"""Samples as long as the target's context, on real vLLM."""

import json
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.dataset import TokenDataset
from paceline.extract.engine import open_engine
from paceline.recipe import ExtractOptions
from tests.engines.common import ROW_BOUND, capture
from tests.engines.models import PLAN, WIDTH, errors_of, make
from tests.targets import save_tokenizer

pytestmark = pytest.mark.engine_vllm

POSITIONS = 512  # of the tiny target


@pytest.mark.usefixtures("own_processes")
def test_samples_of_all_positions_are_captured(tmp_path: Path) -> None:
    target, plain = make("llama", tmp_path)
    save_tokenizer(plain)
    rng = np.random.default_rng(4)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i, length in enumerate([POSITIONS, POSITIONS - 1, 40, POSITIONS]):
            ids = rng.integers(5, 256, length).tolist()
            mask = [int(t >= length // 2) for t in range(length)]
            file.write(json.dumps({"id": f"row-{i}", "input_ids": ids, "loss_mask": mask}) + "\n")
    paceline.prepare(
        target=str(target.folder),
        data=[str(tmp_path / "rows.jsonl")],
        out=str(tmp_path / "prepare"),
        max_length=POSITIONS,
        heldout_share=0.0,
    )
    options = ExtractOptions(
        engine="vllm",
        data=str(tmp_path / "prepare"),
        layers=list(PLAN.aux),
        max_batch_tokens=128,
    )
    samples = list(TokenDataset(tmp_path / "prepare"))
    assert max(s.num_aux_rows + 1 for s in samples) == POSITIONS
    engine = open_engine(options, target, "float32", tmp_path)
    try:
        result = capture(engine, samples, tmp_path / "store", plan=PLAN, width=WIDTH)
    finally:
        engine.close()
    assert max(errors_of(result, samples, plain).values()) <= ROW_BOUND
