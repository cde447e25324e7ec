"""Exported drafts in real vLLM: loaded as trained, drafting, and the answers stay the target's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import paceline
from paceline.dataset import TokenDataset
from paceline.draft.checkpoint import load_draft
from paceline.target.spec import Target, TargetReference
from tests.conftest import SMOLLM2, RealRun

pytestmark = pytest.mark.engine_vllm

NUM_DRAFT_TOKENS = 3
NUM_PROMPTS = 12
ROWS = 9


def prompts_and_answers(run: RealRun) -> tuple[list[list[int]], list[list[int]]]:
    """What the target was asked and what it wrote, greedily, through transformers in float32."""
    prompts, answers = [], []
    for sample in list(TokenDataset(run.prepare).split("train"))[:NUM_PROMPTS]:
        start = int(np.flatnonzero(sample.loss_mask)[0])
        prompts.append(sample.input_ids[:start].tolist())
        answers.append(sample.input_ids[start:].tolist())
    return prompts, answers


def serve(folder: Path, target: Target, run: RealRun, scratch: Path) -> dict[str, Any]:
    prompts, answers = prompts_and_answers(run)
    random = torch.Generator().manual_seed(3)
    width = target.hidden_size
    save_file(
        {
            "aux": torch.randn(ROWS, 3, width, generator=random) * 40,
            "normed": torch.randn(ROWS, width, generator=random),
        },
        scratch / "states.safetensors",
    )
    request = {
        "target": str(target.folder),
        "draft": str(folder),
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "prompts": prompts,
        "max_tokens": [len(answer) for answer in answers],
        "states": str(scratch / "states.safetensors"),
        "answers": str(scratch / "answers.json"),
    }
    (scratch / "request.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "tests.engines.serving.serve", str(scratch / "request.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        **json.loads((scratch / "answers.json").read_text()),
        **load_file(scratch / "answers.json.st"),
        "expected": answers,
    }


@pytest.mark.parametrize("form", ["vllm", "speculators", "sglang"])
def test_an_exported_draft_is_served_as_it_was_trained(
    form: str, real_run: RealRun, tmp_path: Path
) -> None:
    """The SGLang form too: with the default layers its files are vLLM's."""
    target = Target(TargetReference(SMOLLM2))
    paceline.export(draft=str(real_run.draft), out=str(tmp_path / "out"), server=[form])
    served = serve(tmp_path / "out" / form, target, real_run, tmp_path)

    assert served["tokens"] == served["expected"]
    counters = served["counters"]
    assert counters["drafts"] > NUM_PROMPTS
    assert counters["draft_tokens"] == NUM_DRAFT_TOKENS * counters["drafts"]
    # Trained on these answers: a map, a norm or a layer gone wrong accepts next to nothing.
    assert 1 + counters["accepted_tokens"] / counters["drafts"] > 1.3

    trained = load_draft(real_run.draft, target)
    assert tuple(served["layers"]) == trained.config.aux_layers == (2, 15, 27)
    states = load_file(tmp_path / "states.safetensors")
    with torch.no_grad():
        fused = trained.fuse(states["aux"])
        logits = trained.lm_head(states["normed"])
    torch.testing.assert_close(served["fused"], fused, rtol=1e-4, atol=1e-4)
    sayable = torch.isfinite(served["logits"])
    assert sayable.shape == (ROWS, target.vocab_size)
    assert torch.equal(sayable, trained.t2d.expand(ROWS, -1))
    torch.testing.assert_close(served["logits"][:, trained.t2d], logits, rtol=1e-4, atol=1e-4)
