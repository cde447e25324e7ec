"""The arithmetic behind planned times, against torch's own count of operations in real passes."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from paceline.contracts import LayerPlan, TokenSample
from paceline.draft.batch import pack
from paceline.draft.losses import Teacher, distillation_loss
from paceline.plan.data import DataSample
from paceline.plan.shape import shape_of
from paceline.plan.sizes import draft_shape
from paceline.plan.times import step_flops, train_steps
from paceline.prepare.convert import PartRecord
from paceline.recipe import Recipe, build
from paceline.target.spec import Target, TargetReference
from tests.draft.tiny import random_doc, stored, tiny_config, tiny_draft
from tests.targets import _COMMON, FAMILIES

_WIDER = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "head_dim": 32}


def _data(samples):
    samples = tuple(samples)
    return DataSample(samples, 1.0, len(samples), "", PartRecord())


def _sample(number, mask):
    mask = np.array(mask, bool)
    return TokenSample(f"s{number}", np.zeros(len(mask), np.int32), mask)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_forward_pass_takes_what_is_planned(tmp_path, family):
    config = CONFIG_MAPPING[family](**{**_COMMON, **FAMILIES[family], **_WIDER})
    config.save_pretrained(tmp_path)
    shape = shape_of(Target(TargetReference(str(tmp_path)), with_weights=False))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = 48
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    # Eager attention computes the whole square; a causal kernel half of it.
    planned = tokens * shape.token_flops(tokens, with_head=True)
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.02)
    halved = tokens * shape.token_flops(tokens / 2, with_head=True)
    attention = 4 * 8 * 4 * 32 * tokens * tokens
    assert planned - halved == pytest.approx(attention / 2)


@pytest.mark.parametrize("context", [10, 60])
def test_a_training_step_takes_what_is_planned(tmp_path, context):
    """Mostly supervised and mostly context: the cost follows the supervised rows."""
    width = {"hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    config = tiny_config(draft_vocab_size=32, **width)
    masks = [[False] * context + [True] * 40] * 3
    draft = tiny_draft(config)
    draft.embed_tokens.requires_grad_(False)
    batch = pack([stored(random_doc(config, mask, i)) for i, mask in enumerate(masks)])
    rows = batch.num_supervised_rows
    head = torch.randn(32, 64, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        teacher = Teacher(lambda last: last @ head.T)
        loss, _ = distillation_loss(draft, batch, teacher, 3, 0.8, rows, 64)
        loss.backward()
    values = {**_COMMON, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    CONFIG_MAPPING["llama"](**{**values, "vocab_size": 40}).save_pretrained(tmp_path)
    shape = shape_of(Target(TargetReference(str(tmp_path)), with_weights=False))
    recipe = build(Recipe, {"align": {"draft_vocab_size": 32}, "train": {"batch_rows": rows}})
    planned = step_flops(
        recipe.train,
        _data(_sample(i, mask) for i, mask in enumerate(masks)),
        draft_shape(recipe, shape, LayerPlan((1, 2, 3), 8)),
    )
    # Planned but not run: rows that end before the last step, gradients of the states themselves.
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.15)


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"epochs": 2, "batch_rows": 64}, 6), ({"max_steps": 7}, 7), ({"batch_rows": 4096}, 1)],
)
def test_optimiser_steps_follow_the_supervised_tokens(options, steps):
    recipe = build(Recipe, {"train": options})
    data = _data(_sample(i, [False] * 5 + [True] * 20) for i in range(10))
    assert train_steps(recipe.train, data) == steps
