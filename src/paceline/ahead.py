"""What a recipe is refused for before its first stage, since late ones would do it hours later."""

from collections.abc import Mapping

from paceline.contracts import LayerPlan
from paceline.device import choose_device
from paceline.draft.config import DraftConfig
from paceline.draft.from_target import Config
from paceline.errors import VocabularyError
from paceline.evaluate.decode import check_decodable
from paceline.evaluate.prompts import describe_questions
from paceline.forms.carry import FORMS, check_carried
from paceline.forms.source import open_draft
from paceline.recipe import EvaluateOptions, Recipe, StageOptions
from paceline.target.layers import plan_layers
from paceline.target.spec import Target, open_target
from paceline.train.start import check_early, shape_to_train
from paceline.vllm_process import require_vllm


def look_ahead(recipe: Recipe, planned: Mapping[str, StageOptions], to_come: set[str]) -> None:
    """Refuses, from the recipe, the configs that it names and what is installed. planned: of all
    stages; to_come: the names of those that are not finished.

    Raises what the stage would raise.
    """
    if "train" in to_come:
        train = planned["train"]
        check_early(train)
        if train.store == planned["extract"].out:
            target = open_target(train, with_weights=False)
            shape_of_draft(recipe, planned, target, target.text_config, target.num_layers)
    if "evaluate" in to_come:
        _check_evaluate(planned["evaluate"])
    needing = sorted(name for name in to_come if _needs_vllm(name, planned[name]))
    if needing:
        require_vllm(", ".join(needing))


def shape_of_draft(
    recipe: Recipe,
    planned: Mapping[str, StageOptions],
    target: Target,
    text_config: Config,
    num_layers: int,
) -> tuple[LayerPlan, DraftConfig]:
    """The layers that a recipe captures, and the shape of the draft that it trains on them.

    text_config, num_layers: the target's. Raises what `extract` raises of such layers, `train` of
    such a draft, and `export` of one that a server cannot run.
    """
    layers = plan_layers(recipe.extract.layers, num_layers, recipe.extract.layer_convention)
    size, width = recipe.align.draft_vocab_size, text_config.to_dict()["vocab_size"]
    if not recipe.train.start_from and size > width:
        raise VocabularyError(
            f"align.draft_vocab_size {size} is above the target's logit width {width}: give a "
            "smaller one"
        )
    config = shape_to_train(recipe.train, target, text_config, layers.aux, size)
    export = planned["export"]
    if export.draft == planned["train"].out:
        for form in export.server:
            check_carried(FORMS[form], config, num_layers, export.server_version.get(form))
    return layers, config


def _check_evaluate(options: EvaluateOptions) -> None:
    if options.mode != "served":
        choose_device(options.device)
    if options.beside:
        open_draft(options.beside)
    if options.prompts:
        describe_questions(options)
    if options.target:
        check_decodable(options, open_target(options, with_weights=False))


def _needs_vllm(stage: str, options: StageOptions) -> bool:
    if stage == "evaluate":
        return options.mode == "served" and not options.server
    return getattr(options, "engine", None) == "vllm"
