"""What is flagged: rows out of the probe's range, but for those of a sequence's first token."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.contracts import LayerPlan, TokenSample
from paceline.extract.guards import Guards, row_norms
from paceline.extract.probe import run_probe
from paceline.extract.transformers_engine import TransformersEngine
from paceline.recipe import ExtractOptions
from paceline.store import StoreSpec
from paceline.target.spec import Target, TargetReference
from tests.targets import save_target

WIDTH = 4
GUARDS = Guards(LayerPlan((1,), 2), WIDTH, ((0.5, 2.0), (0.5, 2.0)))


@pytest.mark.parametrize(
    ("mask", "where", "row", "flagged"),
    [
        ([0, 1, 1], "last", 0, "k = 2"),
        ([0, 1, 1], "last", 1, "k = 2"),
        ([0, 1], "last", 0, "k = 2"),
        ([1, 1, 1], "last", 0, None),
        ([1, 1, 1], "last", 1, "k = 2"),
        ([0, 1, 1], "aux", 0, None),
        ([1, 1, 1], "aux", 0, None),
        ([0, 1, 1], "aux", 1, "k = 1"),
    ],
)
def test_a_row_out_of_range_is_flagged_unless_it_is_the_first_token_s(
    mask: list[int], where: str, row: int, flagged: str | None
) -> None:
    tokens = np.arange(len(mask), dtype=np.int32)
    sample = TokenSample("s", tokens, np.array(mask, bool))
    states = {"aux": torch.ones(len(mask) - 1, 1, WIDTH), "last": torch.ones(sum(mask), WIDTH)}
    assert GUARDS.flags(sample, row_norms(**states)) == []
    states[where][row] = 1000.0
    found = GUARDS.flags(sample, row_norms(**states))
    assert [line.split(":")[0] for line in found] == ([flagged] if flagged else [])


@torch.no_grad()
def test_the_probe_s_range_leaves_out_a_first_token_that_is_a_whole_prompt(tmp_path: Path) -> None:
    first = 5
    folder = save_target(tmp_path / "target", tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # A massive activation that stays in the residual stream.
    model.model.embed_tokens.weight[first] *= 1000.0
    model.save_pretrained(folder)
    target = Target(TargetReference(str(folder)))
    engine = TransformersEngine(ExtractOptions(device="cpu"), target, "float32")
    plan = LayerPlan((2,), 8)
    prompt = np.array([first], np.int32)
    probe = run_probe(
        engine, target, StoreSpec(plan, 32, "float32"), [prompt], tmp_path / "scratch", 8
    )
    [answer] = engine.greedy([prompt], 64)
    assert first not in answer
    inputs: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    ids = torch.tensor([[first, *answer]])
    hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    # The last token of all is no row of `last`, nor is what stands behind the last such row one
    # of `aux`.
    for found, states in zip(probe.rms_ranges, (hidden[2][0][1:63], inputs[0][1:64]), strict=True):
        rms = states.pow(2).mean(-1).sqrt()
        assert found == pytest.approx((float(rms.min()), float(rms.max())), rel=1e-4)
        assert float(rms.max()) < 100.0
