"""The shape of a draft: what its weights mean, and what a server must be told of it."""

from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PretrainedConfig

from paceline.errors import TrainingError

AUX_NORMS = ("rms", "joint", "static", "none")

# Scalings of rotary positions that transformers and every server compute alike, with the keys that
# all of them read: a further key means something to one and nothing to another.
SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True)
class DraftConfig:
    """Legend: E hidden_size, D target_hidden_size, V vocab_size, W draft_vocab_size.

    rope: transformers-5 form, `rope_theta` and `rope_type` and the scaling's own keys.
    aux_layers: hidden-state indices k. aux_norm: `rms` a trained RMSNorm per auxiliary state,
    `joint` one RMSNorm over all of them side by side (others' `norm_before_fc`), `static` a fixed
    scale per state, `none`. norm_output: the normed state, not the residual stream, is fed to the
    next step (EAGLE-3.1). norm_before_residual: the first layer's residual is the normed state.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_layers: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any] = field(default_factory=dict)
    hidden_act: str = "silu"
    qk_norm: bool = False
    aux_norm: str = "rms"
    norm_output: bool = False
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.hidden_size % self.num_attention_heads:
            problems.append(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}, as servers on transformers 5 ask of a llama"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd: rotary positions turn pairs")
        if self.aux_norm not in AUX_NORMS:
            problems.append(f"aux_norm {self.aux_norm!r} is none of {AUX_NORMS}")
        if self.draft_vocab_size > self.vocab_size:
            problems.append(
                f"draft_vocab_size {self.draft_vocab_size} is above vocab_size {self.vocab_size}"
            )
        if problems:
            raise TrainingError("draft: " + "; ".join(problems))

    @property
    def num_aux(self) -> int:
        return len(self.aux_layers)

    @property
    def shares_embedding(self) -> bool:
        """The target's embedding fits only a draft of the target's width."""
        return self.hidden_size == self.target_hidden_size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DraftConfig":
        return cls(**{**values, "aux_layers": tuple(values["aux_layers"])})


def rope_of(config: PretrainedConfig | dict[str, Any]) -> dict[str, Any]:
    """A config's rotary parameters in transformers-5 form, from either spelling.

    transformers 5 keeps `rope_parameters` (theta inside); transformers 4 keeps `rope_theta` and
    `rope_scaling` beside it. Nothing falls back to a default theta: without one it is an error.
    """
    values = config if isinstance(config, dict) else config.to_dict()
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    rope.setdefault("rope_type", "default")
    if rope.get("rope_theta") is None:
        if values.get("rope_theta") is None:
            raise TrainingError(
                "the config has no rope_theta, neither alone nor in rope_parameters"
            )
        rope["rope_theta"] = values["rope_theta"]
    return rope
