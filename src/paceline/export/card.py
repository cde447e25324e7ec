"""The model card of an exported draft: what it is for, how it was made, what it accepts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from paceline import __version__
from paceline.draft.config import DraftConfig
from paceline.export.serving import is_hub_id
from paceline.forms.carry import FORMS
from paceline.target.spec import TargetReference

CARD_FILE = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")


def model_card(
    target: TargetReference,
    config: DraftConfig,
    form: Mapping[str, Any],
    trained: Mapping[str, Any] | None,
    evaluated: Mapping[str, Any] | None,
) -> str:
    """Markdown with the Hub's YAML head.

    form: an entry of the stage's `forms`. trained: options, result and inputs of `train`; None for
    a draft made elsewhere. evaluated: what `evaluate` returned.
    """
    environment = jinja2.Environment(
        keep_trailing_newline=True, trim_blocks=False, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(_TEMPLATE.read_text())
    return template.render(
        target=target.target,
        revision=target.revision,
        is_hub_id=is_hub_id(target),
        form=form["form"],
        server=FORMS[form["form"]].server,
        lowest_version=form["lowest_version"],
        command=form["command"],
        dtype=form["dtype"],
        replay=form["replay"],
        version=__version__,
        shape=_shape(config),
        training=None if trained is None else _training(trained),
        acceptance=None if evaluated is None else _acceptance(evaluated),
    )


def _shape(config: DraftConfig) -> list[tuple[str, Any]]:
    rope = ", ".join(f"{key} {value}" for key, value in config.rope.items())
    return [
        ("decoder layers", config.num_layers),
        ("width", config.hidden_size),
        ("auxiliary hidden states k", ", ".join(map(str, config.aux_layers))),
        ("norm before fc", config.aux_norm),
        ("draft vocabulary", f"{config.draft_vocab_size} of {config.vocab_size} tokens"),
        ("longest position", config.max_position_embeddings),
        ("rotary positions", rope),
    ]


def _training(trained: Mapping[str, Any]) -> list[tuple[str, Any]]:
    options, result = trained["options"], trained["result"]
    rows = [
        ("training samples", result["train_samples"]),
        ("optimiser steps", result["steps"]),
        ("supervised rows per step", options["batch_rows"]),
        ("training-time-test steps", options["ttt_steps"]),
        ("peak learning rate", options["learning_rate"]),
        ("schedule", options["schedule"]),
        ("seed", options["seed"]),
        ("arithmetic", result["dtype"]),
    ]
    rows += [
        (f"{name} (fingerprint)", made["fingerprint"])
        for name, made in trained["inputs"].items()
        if isinstance(made["fingerprint"], str)
    ]
    return rows


def _acceptance(evaluated: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for k, table in evaluated["results"].items():
        sources = table["sources"] if len(table["sources"]) > 1 else {}
        for source, figures in {"all": table["pooled"], **sources}.items():
            rows.append(_row(source, k, figures))
    return {
        "definition": evaluated["definition"].rstrip("."),
        "mode": evaluated["mode"],
        "split": evaluated["split"],
        "dtype": evaluated["dtype"],
        "rows": rows,
    }


def _row(source: str, k: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    length, interval = figures["acceptance_length"], figures["interval"]
    return {
        "source": source,
        "k": k,
        "length": "none" if length is None else f"{length:.3f}",
        "interval": "none" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
        "steps": f"{figures['verify_steps']:.0f}",
        "positions": ", ".join(f"{share:.3f}" for share in figures["per_position"]),
    }
