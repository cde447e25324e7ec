"""Exported drafts in real vLLM: loaded as trained, drafting, and the answers stay the target's."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import paceline
from paceline.dataset import TokenDataset
from paceline.draft.checkpoint import load_draft
from paceline.target.spec import Target
from tests.conftest import RealRun
from tests.engines.common import WIDTH

pytestmark = pytest.mark.engine_vllm

FORMS = ("vllm", "speculators", "sglang")
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


@pytest.fixture(scope="module")
def states() -> dict[str, torch.Tensor]:
    """What the draft models are asked about."""
    random = torch.Generator().manual_seed(3)
    return {
        "aux": torch.randn(ROWS, 3, WIDTH, generator=random) * 40,
        "normed": torch.randn(ROWS, WIDTH, generator=random),
    }


@pytest.fixture(scope="module")
def served(
    real_run: RealRun,
    target: Target,
    states: dict[str, torch.Tensor],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with FORM.json and FORM.json.st of each form: what `serve` answered."""
    folder = tmp_path_factory.mktemp("served")
    paceline.export(draft=str(real_run.draft), out=str(folder / "out"), server=list(FORMS))
    save_file(states, folder / "states.safetensors")
    prompts, answers = prompts_and_answers(real_run)
    requests = [folder / f"{form}-request.json" for form in FORMS]
    for form, path in zip(FORMS, requests, strict=True):
        request = {
            "target": str(target.folder),
            "draft": str(folder / "out" / form),
            "num_draft_tokens": NUM_DRAFT_TOKENS,
            "prompts": prompts,
            "max_tokens": [len(answer) for answer in answers],
            "states": str(folder / "states.safetensors"),
            "answers": str(folder / f"{form}.json"),
        }
        path.write_text(json.dumps(request))
    command = [sys.executable, "-m", "tests.engines.serving.serve", *map(str, requests)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_an_exported_draft_is_served_as_it_was_trained(
    form: str, real_run: RealRun, target: Target, states: dict[str, torch.Tensor], served: Path
) -> None:
    """The SGLang form too: with the default layers its files are vLLM's."""
    answer = json.loads((served / f"{form}.json").read_text())
    made = load_file(served / f"{form}.json.st")
    _, expected = prompts_and_answers(real_run)

    assert answer["tokens"] == expected
    counters = answer["counters"]
    assert counters["drafts"] > NUM_PROMPTS
    assert counters["draft_tokens"] == NUM_DRAFT_TOKENS * counters["drafts"]
    # Trained on these answers: a map, a norm or a layer gone wrong accepts next to nothing.
    assert 1 + counters["accepted_tokens"] / counters["drafts"] > 1.3

    trained = load_draft(real_run.draft, target)
    assert tuple(answer["layers"]) == trained.config.aux_layers == (2, 15, 27)
    with torch.no_grad():
        fused = trained.fuse(states["aux"])
        logits = trained.lm_head(states["normed"])
    torch.testing.assert_close(made["fused"], fused, rtol=1e-4, atol=1e-4)
    sayable = torch.isfinite(made["logits"])
    assert sayable.shape == (ROWS, target.vocab_size)
    assert torch.equal(sayable, trained.t2d.expand(ROWS, -1))
    torch.testing.assert_close(made["logits"][:, trained.t2d], logits, rtol=1e-4, atol=1e-4)
