"""Options of what makes a draft, measures it and gives it away."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.recipe.base import (
    Beta,
    CacheOptions,
    Dtype,
    Options,
    StageOptions,
    TargetOptions,
    TrainDtype,
    WarmupSteps,
    opt,
)


class AlignOptions(StageOptions, TargetOptions):
    """`align`: the draft vocabulary from the supervised tokens."""

    data: str = opt("", "Folder that `prepare` wrote.", identity=False)
    store: str = opt(
        "", "Store in place of `data`, for states that `import-store` took in.", identity=False
    )
    draft_vocab_size: int = opt(32000, "Tokens that the draft can say.", ge=1)


class DraftOptions(Options):
    """The shape of the draft; None: taken from the target."""

    num_layers: int = opt(1, "Decoder layers.", ge=1)
    hidden_size: int | None = opt(None, "Hidden width of the draft.", ge=1)
    intermediate_size: int | None = opt(None, "Width of its MLP.", ge=1)
    num_attention_heads: int | None = opt(None, "Query heads.", ge=1)
    num_key_value_heads: int | None = opt(None, "Key and value heads.", ge=1)
    head_dim: int | None = opt(None, "Width of a head.", ge=1)
    rope_theta: float | None = opt(
        None, "Base of its rotary positions, which are plain then, whatever the target's are.", gt=0
    )
    max_position_embeddings: int | None = opt(None, "Longest position that it is made for.", ge=1)
    qk_norm: bool = opt(False, "Norms on queries and keys (Qwen3 style).")
    aux_norm: Literal["rms", "static", "none"] = opt(
        "rms",
        "Norm of each auxiliary state before `fc`: a trained RMSNorm (vLLM >= 0.22), a "
        "fixed scale folded into `fc` at export (any server), or none.",
    )
    norm_output: bool = opt(False, "Feed the normed state to the next step (EAGLE-3.1).")
    init: Literal["target", "random"] = opt(
        "target",
        "Starting values beside the target's head rows. target: its last layers and final norm, "
        "best for short runs; random: small random weights, gains of one, with Muon best for long "
        "ones.",
    )


class TrainOptions(StageOptions, TargetOptions, CacheOptions):
    """`train`: an EAGLE-3 draft from a store and a draft vocabulary."""

    store: str = opt("", "Folder that `extract` wrote, or the URL of a store.", identity=False)
    follow: bool = opt(
        False,
        "Train from a store that `extract` still writes, from its first shards on; more than one "
        "epoch needs room for the whole store.",
        identity=False,
    )
    follow_wait_s: float = opt(
        600.0,
        "How long to wait for an `extract` that has not begun, seconds.",
        identity=False,
        ge=0,
    )
    vocab: str = opt("", "Folder that `align` wrote.", identity=False)
    draft: DraftOptions = Field(default_factory=DraftOptions, description="Shape of the draft.")
    start_from: str = opt(
        "",
        "Draft to train further: a folder of `train`, a compact draft, or a server's checkpoint "
        "made elsewhere. Its shape and its vocabulary are kept; `draft` and `vocab` are not read "
        "then.",
        identity=False,
    )
    start_form: Literal["vllm", "speculators", "sglang"] | None = opt(
        None, "Which server's form such a checkpoint is in; None: as its config says."
    )
    train_head: bool = opt(
        True,
        "Train the draft's head too; false: it stays as it is, the target's own rows (or those of "
        "`start_from`), so that it costs no gradient; the target's cost no bytes in a compact file "
        "either, and a large draft vocabulary is cheap.",
    )
    ttt_steps: int = opt(3, "Training-time-test steps.", ge=1)
    ttt_warmup: float = opt(
        0.0, "Share of the run trained with one TTT step only, before all of them.", ge=0, le=1
    )
    step_decay: float = opt(0.8, "Weight of TTT step j is this to the power j.", gt=0, le=1)
    loss: Literal["kl", "total_variation", "log_acceptance", "hybrid"] = opt(
        "kl",
        "Loss of a row. kl: against the target's softmax on the draft vocabulary. The others are "
        "of the chance a that a draft token is accepted, against the target's whole softmax: "
        "total_variation 1 - a, log_acceptance -log a, hybrid: from kl to total_variation as a "
        "grows.",
    )
    teacher_temperature: float = opt(
        1.0,
        "Temperature of the target's softmax that is taught; below 1 the draft learns more of what "
        "greedy decoding takes and less of the rest.",
        gt=0,
    )
    epochs: float = opt(1.0, "Passes over the supervised rows.", gt=0)
    max_steps: int | None = opt(None, "Optimiser steps; takes the place of `epochs`.", ge=1)
    batch_rows: int = opt(
        1024,
        "Supervised rows in one optimiser step on average, over all ranks and accumulation; an "
        "answer that has more is a step's worth and makes its step longer.",
        ge=1,
    )
    micro_batch_tokens: int = opt(
        16384, "Most tokens in one forward pass; more are accumulated.", identity=False, ge=1
    )
    learning_rate: float = opt(2e-3, "Peak learning rate.", gt=0)
    warmup_steps: WarmupSteps = opt(
        0.15, "Optimiser steps of linear warm-up; below 1 a share of all steps."
    )
    schedule: Literal["cosine", "linear", "constant"] = opt("cosine", "Decay after the warm-up.")
    min_lr_ratio: float = opt(0.03, "Learning rate at the end as a share of the peak.", ge=0, le=1)
    optimiser: Literal["adamw", "muon"] = opt(
        "adamw",
        "adamw, or muon for the matrices of fusion and layers (its steps are scaled to the size of "
        "AdamW's) with adamw for the head and the gains.",
    )
    betas: tuple[Beta, Beta] = opt((0.9, 0.95), "AdamW betas.")
    weight_decay: float = opt(0.0, "Weight decay of matrices.", ge=0)
    max_grad_norm: float = opt(1.0, "Gradients are clipped to this norm.", gt=0, allow_inf_nan=True)
    state_noise: float = opt(
        0.0,
        "Uniform noise on the auxiliary states in training, at most this share of a state's root "
        "mean square; against overfitting in many epochs.",
        ge=0,
        lt=1,
    )
    seed: int = opt(0, "Seed of weights, data order and noise.")
    dtype: TrainDtype = opt(
        "auto",
        "Dtype of the arithmetic; weights are kept in float32. auto: bfloat16 on a GPU, the faster "
        "of float32 and bfloat16 on a CPU.",
    )
    device: str = opt("auto", "Device.", identity=False)
    parallel: Literal["ddp", "fsdp2"] = opt(
        "ddp",
        "How the ranks that torchrun started share the weights. ddp: each has all of them; fsdp2: "
        "the float32 weights, optimiser states and gradients are split between them.",
        identity=False,
    )
    logit_chunk: int = opt(
        2048, "Teacher positions whose logits are in memory at a time.", identity=False, ge=1
    )
    log_every: int = opt(10, "Optimiser steps between log records.", identity=False, ge=1)
    checkpoint_every: int = opt(200, "Optimiser steps between checkpoints.", identity=False, ge=1)
    eval_every: int | None = opt(
        None,
        "Optimiser steps between looks at held-out data (loss, acceptance length), the best draft "
        "being kept in `best/`; None: at the end only.",
        ge=1,
    )
    eval_samples: int | None = opt(
        256, "Held-out samples that are looked at, spread over the split; None: all.", ge=1
    )
    eval_draft_tokens: int = opt(5, "Chain length K of the held-out acceptance length.", ge=1)
    load_best_model_at_end: bool = opt(
        False,
        "The result is the draft of the best acceptance length that `eval_every` has seen, not the "
        "last one.",
    )
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = opt(
        [], "Where log records go besides `log.jsonl`.", identity=False
    )

    def identity(self) -> dict[str, Any]:
        """Looks at held-out data shape the result only where the best draft is chosen by them."""
        shaping = super().identity()
        if not self.load_best_model_at_end:
            shaping = {name: value for name, value in shaping.items() if name not in _LOOKS}
        return shaping

    @model_validator(mode="after")
    def _looks(self) -> Self:
        if self.load_best_model_at_end and not self.eval_every:
            raise ValueError("load_best_model_at_end: set eval_every, which finds the best draft")
        return self


_LOOKS = ("eval_every", "eval_samples", "eval_draft_tokens", "load_best_model_at_end")


class ReplayOptions(TargetOptions):
    """`replay`: a step that stopped a training (`nan_batch`), computed again sample by sample."""

    folder: str = opt("", "Folder `nan_batch` that a training left.", positional=True)
    device: str = opt("auto", "Device.")


class SpeedupOptions(Options):
    """Predicted speed-up: target and draft steps are timed, acceptance is as measured."""

    predict: bool = opt(
        False, "Time both models' steps here and predict the speed-up of every chain length."
    )
    batch_sizes: list[int] = opt([1, 2, 4, 8, 16, 32, 64], "Requests that are decoded together.")
    contexts: list[int] = opt([512, 2048], "Tokens that each request has in its cache.")

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if min([*self.batch_sizes, *self.contexts], default=0) < 1:
            raise ValueError("batch_sizes, contexts: give numbers of 1 or more")
        return self


class DraftSourceOptions(Options):
    """Which draft is measured or written."""

    draft: str = opt(
        "",
        "Folder that `train` wrote, a compact draft, or a server's checkpoint made elsewhere.",
        identity=False,
    )
    draft_form: Literal["vllm", "speculators", "sglang"] | None = opt(
        None, "Which server's form a checkpoint made elsewhere is in; None: as its config says."
    )


class EvaluateOptions(DraftSourceOptions, StageOptions, TargetOptions, CacheOptions):
    """`evaluate`: acceptance length, server-free, in real decoding or in a server."""

    beside: str = opt(
        "",
        "Another draft for this target that is walked over the same answers and shown beside "
        "(mode chain).",
        identity=False,
    )
    store: str = opt("", "Store whose answers are walked (mode chain).", identity=False)
    data: str = opt(
        "", "Token data set whose prompts are answered (modes decode, served).", identity=False
    )
    prompts: list[str] = opt(
        [],
        "Prompt sets in place of `data` (modes decode, served): .jsonl files of `turns` (or "
        "`prompt`), a set per file, as MT-Bench's question.jsonl.",
        identity=False,
    )
    mode: Literal["chain", "decode", "served"] = opt(
        "chain",
        "chain: exact, server-free; decode: real lossless speculative decoding with "
        "transformers; served: through vLLM.",
    )
    split: Literal["heldout", "train"] = opt("heldout", "Which samples; prompt sets have none.")
    num_draft_tokens: list[int] = opt([1, 3, 5, 7], "Chain lengths K.")
    limit: int | None = opt(None, "Only the first N samples, or the first N of each set.", ge=1)
    max_turns: int | None = opt(None, "Only the first N turns of each prompt.", ge=1)
    max_new_tokens: int = opt(128, "Longest answer of modes decode and served, tokens.", ge=1)
    temperature: float = opt(
        0.0,
        "0: greedy; above: answers are sampled in mode decode; mode chain expects acceptance of "
        "answers that were sampled so.",
        ge=0.0,
    )
    chat_template: str | None = opt(
        None, "File with a Jinja chat template for `prompts`, in place of the tokenizer's own."
    )
    chat_template_kwargs: dict[str, Any] = opt(
        {}, "Variables for that template, such as `enable_thinking: false`."
    )
    system_prompt: str | None = opt(None, "System message of `prompts`.")
    server: str | None = opt(
        None,
        "Base URL of an OpenAI-compatible vLLM server that runs with the draft (mode served); "
        "None: vLLM is started here.",
        identity=False,
    )
    plain_server: str | None = opt(
        None, "Base URL of a server of the same target without a draft.", identity=False
    )
    api_key: str | None = opt(
        None, "Key for the servers; None: the environment's OPENAI_API_KEY.", identity=False
    )
    served_model: str | None = opt(None, "Model name at the servers; None: the only one.")
    compare_plain: bool = opt(
        True, "Run the target without the draft too: tokens per second and outputs beside it."
    )
    batch_sizes: list[int] = opt(
        [1],
        "Requests at a time in mode served: acceptance is that of the first number, speed is "
        "measured at all of them. At 1 the intervals are over conversations.",
    )
    engine_options: dict[str, Any] = opt(
        {}, "Further arguments of vLLM's constructor in mode served (its own names)."
    )
    speedup: SpeedupOptions = Field(
        default_factory=SpeedupOptions, description="Predicted speed-up."
    )
    baselines: bool = opt(True, "Also walk a bigram table and prompt lookup (mode chain).")
    bootstrap: int = opt(2000, "Resamples of the 95% interval over conversations.", ge=100)
    seed: int = opt(0, "Seed of the bootstrap and of sampled answers.")
    dtype: Dtype = opt("auto", "Dtype of the draft (and of the target in modes decode, served).")
    device: str = opt("auto", "Device.", identity=False)

    @model_validator(mode="after")
    def _chain_lengths(self) -> Self:
        if not self.num_draft_tokens or min(self.num_draft_tokens) < 1:
            raise ValueError("num_draft_tokens: give chain lengths of 1 or more")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError("batch_sizes: give numbers of 1 or more")
        if self.prompts and self.mode == "chain":
            raise ValueError(
                "prompts: modes decode and served ask them; mode chain walks a store, which "
                "`generate`, `prepare` and `extract` make of a prompt set (docs/evaluate.md)"
            )
        if self.server and self.mode != "served":
            raise ValueError("server: only mode served asks one")
        if self.beside and (self.mode != "chain" or self.temperature):
            raise ValueError("beside: only mode chain at temperature 0 walks a second draft")
        if self.temperature and self.mode == "served":
            raise ValueError("temperature: mode served is greedy, so that outputs can be compared")
        return self


class ExportOptions(DraftSourceOptions, StageOptions, TargetOptions):
    """`export`: a checkpoint that a server loads, re-loaded and compared."""

    server: list[Literal["vllm", "speculators", "sglang"]] = opt(
        ["vllm"], "Forms to write, each in a folder of its own.", min_length=1
    )
    server_version: dict[Literal["vllm", "speculators", "sglang"], str] = opt(
        {},
        "Release that is to serve a form, with three numbers such as `vllm: 0.22.0` (speculators: "
        "vLLM's): a draft that it cannot carry is refused.",
    )
    compact: bool = opt(
        False,
        "Also write the draft in 8 bits into a folder `compact`, to keep: `evaluate`, `train` and "
        "`export` read it, no server does.",
    )
    num_speculative_tokens: int = opt(3, "Chain length in the printed serving command.", ge=1)
    dtype: Dtype = opt("auto", "Dtype of the exported weights; auto: the target's.")
    copy_embedding: bool = opt(
        False,
        "Write the target's embedding too, bit for bit (vLLM cannot share it when the target runs "
        "in a pipeline over several GPUs).",
    )
    evaluate: str = opt(
        "", "Folder that `evaluate` wrote: its acceptance goes into the model card.", identity=False
    )
    verify: bool = opt(
        False, "Replay a finished export against the trained draft once more.", identity=False
    )

    @field_validator("server_version", mode="before")
    @classmethod
    def _three_numbers(cls, value: Any) -> Any:
        for form, version in value.items() if isinstance(value, dict) else ():
            if isinstance(version, int | float):
                raise ValueError(
                    f"{form}: {version} was read as a number; write three, such as 0.20.0"
                )
        return value

    @model_validator(mode="after")
    def _of_written_forms(self) -> Self:
        if others := sorted(set(self.server_version) - set(self.server)):
            raise ValueError(f"server_version: {', '.join(others)} is not among `server`")
        return self


class ReportOptions(StageOptions):
    """`report`: one self-contained HTML page about a run."""

    run_dir: str = opt("", "Folder that holds the stages' folders.", identity=False)
    compare: bool = opt(False, "Set several runs side by side: `report --compare RUN RUN`.")
    runs: list[str] = opt(
        [],
        "With `compare`: the runs, the first being what others are held against.",
        identity=False,
        positional=True,
    )
    out: str = opt(
        "",
        "Folder of the page; left out: `report` inside `run_dir`, `compare` beside the first run.",
        identity=False,
    )
    title: str | None = opt(None, "Title of the page; None: the target's and the run's names.")
