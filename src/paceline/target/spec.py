"""The target without its weights: shape, tokenizer, end-of-turn ids, fingerprints."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from paceline.errors import FingerprintMismatch, TargetError
from paceline.recipe import TargetOptions
from paceline.target.convert_gguf import converted_from
from paceline.target.identity import ids_in, read_json, text_fingerprints_of
from paceline.target.resolve import resolve
from paceline.target.weights import Weights


@dataclass(frozen=True)
class TargetReference:
    """What a manifest keeps of a target, so that later stages need not be told again."""

    target: str
    revision: str | None = None
    trust_remote_code: bool = False


class Target:
    """A target model on disk. Nothing heavy is loaded until asked for."""

    def __init__(self, reference: TargetReference, with_weights: bool = True) -> None:
        """with_weights: false for work that needs none, so that none are fetched."""
        self.reference = reference
        self.folder: Path = resolve(reference.target, reference.revision, with_weights)

    @cached_property
    def config(self) -> PretrainedConfig:
        _refuse_lost_rope(self.folder)
        try:
            return AutoConfig.from_pretrained(
                self.folder, trust_remote_code=self.reference.trust_remote_code
            )
        except (ValueError, OSError, KeyError) as error:
            raise TargetError(f"{self.folder}: config.json cannot be used: {error}") from error

    @cached_property
    def text_config(self) -> PretrainedConfig:
        """The language model's own config; that of a wrapped (multimodal) model's text part."""
        return self.config.get_text_config()

    @property
    def num_layers(self) -> int:
        return self._dimension("num_hidden_layers")

    @property
    def hidden_size(self) -> int:
        return self._dimension("hidden_size")

    @property
    def vocab_size(self) -> int:
        """Width of the logits; padding ids of the embedding included."""
        return self._dimension("vocab_size")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            return AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=self.reference.trust_remote_code
            )
        except (ValueError, OSError, KeyError) as error:
            raise TargetError(f"{self.folder}: tokenizer cannot be loaded: {error}") from error

    @cached_property
    def num_real_tokens(self) -> int:
        """How many ids the tokenizer can say (highest id + 1); never above the logit width."""
        return min(max(self.tokenizer.get_vocab().values()) + 1, self.vocab_size)

    @cached_property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """Ids that end the target's turn: of the generation config, the config, the tokenizer."""
        found: set[int] = set()
        for value in (
            read_json(self.folder / "generation_config.json").get("eos_token_id"),
            getattr(self.text_config, "eos_token_id", None),
            self.tokenizer.eos_token_id,
        ):
            found |= ids_in(value)
        return tuple(sorted(i for i in found if i < self.vocab_size))

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.folder)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """By part, see `identity`; of a GGUF file, which holds them all, its own for each."""
        weights = converted_from(self.folder) or self.weights.fingerprint()
        return {**self.text_fingerprints, "weights": weights}

    @cached_property
    def text_fingerprints(self) -> dict[str, str]:
        """Of the parts that shape token ids: no weights need be there."""
        if source := converted_from(self.folder):
            return dict.fromkeys(("config", "tokenizer"), source)
        return text_fingerprints_of(self.folder)

    def check_made_by(self, made_by: dict[str, str], what: str, remedy: str = "") -> None:
        """Refuses what another target made. made_by: the fingerprints that its manifest recorded.

        Raises FingerprintMismatch, which names the parts that differ and ends with `remedy`.
        """
        wrong = [part for part, value in made_by.items() if self.fingerprints.get(part) != value]
        if wrong:
            raise FingerprintMismatch(
                f"{what} another target: {', '.join(wrong)} differ from those of "
                f"{self.reference.target}. {remedy}".rstrip()
            )

    def describe_input(self) -> dict[str, Any]:
        """The target as an entry of a manifest's `inputs`."""
        return {"path": self.reference.target, "fingerprint": self.fingerprints}

    def native_dtype(self) -> torch.dtype:
        """The dtype that the checkpoint is meant to run in."""
        dtype = getattr(self.config, "dtype", None) or getattr(self.text_config, "dtype", None)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        return dtype or torch.float32

    def layer_tensors(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of decoder layer `index` by their names inside the layer."""
        return self.weights.load_layer(index)

    def _dimension(self, name: str) -> int:
        value = getattr(self.text_config, name, None)
        if not isinstance(value, int):
            raise TargetError(
                f"{self.folder}: config.json says no {name} (looked in the text config too)"
            )
        return value


def _refuse_lost_rope(folder: Path) -> None:
    """transformers 4 passes over `rope_parameters`, which transformers 5 writes, without a word,
    and so does a vLLM that runs beside it: both would run other positions, and agree."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return
    config = json.loads((folder / "config.json").read_text())
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        rope = part.get("rope_parameters") or {}
        # One for all layers, or one for each kind of layer.
        kinds = [value for value in rope.values() if isinstance(value, dict)] or [rope]
        scaled = any(kind.get("rope_type", "default") != "default" for kind in kinds)
        if rope and ("rope_theta" not in part or (scaled and "rope_scaling" not in part)):
            raise TargetError(
                f"{folder}/config.json has `rope_parameters`, which transformers "
                f"{transformers.__version__} ignores: the target would run with other rotary "
                "positions. Write `rope_theta` and `rope_scaling` beside it, or use transformers 5"
            )


def open_target(
    options: TargetOptions, recorded: dict[str, Any] | None = None, with_weights: bool = True
) -> Target:
    """The target that the options name, else the one that an input's manifest recorded.

    `recorded`: a manifest's result["target"] (a TargetReference as a dict).
    """
    if options.target:
        reference = TargetReference(options.target, options.revision, options.trust_remote_code)
        return Target(reference, with_weights)
    if recorded is None:
        raise TargetError("no target given: pass `target` (a folder, a Hub id or pkg:PACKAGE/FILE)")
    return Target(TargetReference(**recorded))


def long_rope_from(target: Target) -> int | None:
    """LongRoPE (Phi 3 and 4, MiniCPM): the length beyond which the model turns to other rotary
    frequencies, for all its positions. transformers looks at the longest row of a batch, vLLM at
    `max_model_len`. None: the target has no such thing."""
    config = target.text_config
    said = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # transformers 5 may keep one such dict per kind of layer.
    kinds = [said, *(part for part in said.values() if isinstance(part, dict))]
    for rope in kinds:
        if rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
            original = rope.get("original_max_position_embeddings")
            return original or getattr(config, "original_max_position_embeddings", None)
    return None
