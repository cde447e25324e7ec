"""What is measured belongs together: target, draft, and the answers or prompts."""

import pytest

import paceline
from paceline.ahead import look_ahead
from paceline.errors import EvaluationError, FingerprintMismatch
from paceline.forms.config_json import Serving
from paceline.forms.write import write_draft
from paceline.recipe import EvaluateOptions, Recipe
from paceline.target.spec import Target, TargetReference
from tests.export.making import trained_folder
from tests.forms.making import config_for, draft_for
from tests.lines import TINY_LAYERS, extracted
from tests.targets import edit_json, save_target

CONFIG = config_for(
    hidden_size=32,
    target_hidden_size=32,
    head_dim=8,
    vocab_size=320,
    draft_vocab_size=100,
    aux_layers=tuple(TINY_LAYERS),
)


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """`prepare` and `store` of `target`, and drafts that another target made: `draft` of `train`,
    `exported` a checkpoint."""
    folder = tmp_path_factory.mktemp("line")
    extracted(folder)
    other = Target(TargetReference(str(save_target(folder / "other", seed=1))))
    draft = draft_for(other, CONFIG)
    trained_folder(folder / "draft", draft, other)
    write_draft(folder / "exported", draft, "vllm", other, Serving("float32"))
    return folder


def measure(line, out, mode, draft, **options):
    answers = {"store": "store"} if mode == "chain" else {"data": "prepare"}
    return paceline.evaluate(
        mode=mode,
        draft=str(line / draft),
        out=str(out),
        dtype="float32",
        num_draft_tokens=[2],
        max_new_tokens=4,
        bootstrap=100,
        **{name: str(line / folder) for name, folder in answers.items()},
        **options,
    )


@pytest.mark.parametrize("mode", ["chain", "decode"])
def test_a_draft_of_another_target_is_refused(line, tmp_path, mode):
    with pytest.raises(FingerprintMismatch, match="draft was trained on another target: weights"):
        measure(line, tmp_path, mode, "draft", target=str(line / "target"))


@pytest.mark.parametrize("mode", ["chain", "decode"])
def test_a_checkpoint_is_measured_on_the_target_of_the_answers(line, tmp_path, mode):
    """It says of no target that it was made for it."""
    found = measure(line, tmp_path, mode, "exported")
    assert found["target"]["target"] == str(line / "target")
    assert found["results"]["2"]["pooled"]["verify_steps"] > 0


@pytest.mark.parametrize(
    ("part", "file", "change"),
    [
        ("config", "config.json", {"rms_norm_eps": 1e-4}),
        ("tokenizer", "tokenizer.json", {"normalizer": {"type": "Lowercase"}}),
    ],
)
def test_prompts_prepared_for_another_target_are_refused(line, tmp_path, part, file, change):
    target = save_target(tmp_path / "target")
    edit_json(target / file, **change)
    with pytest.raises(FingerprintMismatch, match=f"prepared for another target: {part} differ"):
        measure(line, tmp_path / "out", "decode", "exported", target=str(target))


@pytest.mark.parametrize("options", [{"mode": "decode"}, {"speedup": {"predict": True}}])
def test_decoding_of_a_target_whose_states_cannot_be_taken_back_is_refused_first(
    line, tmp_path, options
):
    """Before the draft's own answers are walked: the draft is of another target, and not yet
    looked at."""
    target = save_target(tmp_path / "target", "qwen3_next")
    values = {"mode": "chain"} | options
    with pytest.raises(EvaluationError, match="layers of linear_attention"):
        measure(line, tmp_path / "out", draft="draft", target=str(target), **values)
    asked = EvaluateOptions(target=str(target), **options)
    with pytest.raises(EvaluationError, match="use mode chain or served"):
        look_ahead(Recipe(), {"evaluate": asked}, {"evaluate"})
