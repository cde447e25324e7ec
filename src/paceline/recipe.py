"""All options of all stages: types, defaults and documentation, in this one place.

The command line and the Python functions are both made from these models; a recipe is one YAML
file of them. An option marked `identity=False` may change between two runs of the same work: it
decides how fast or where, never what.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.errors import UsageError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


def opt(
    default: Any, doc: str, *, identity: bool = True, positional: bool = False, **constraints: Any
) -> Any:
    """A field with its documentation; `identity=False` keeps it out of what names the work,
    `positional=True` lets it be given without its name."""
    extra = {"identity": identity, "positional": positional}
    return Field(default, description=doc, json_schema_extra=extra, **constraints)


class Options(BaseModel):
    """Base of all option groups: unknown names are errors, documentation is on the field."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True)

    def identity(self) -> dict[str, Any]:
        """The options that shape the result, as JSON can say them."""
        shaping = {
            name
            for name, info in type(self).model_fields.items()
            if (info.json_schema_extra or {}).get("identity", True)
        }
        return self.model_dump(mode="json", include=shaping)


def positional_options(model: type[Options]) -> list[str]:
    """Names of the options that may be given without their names, in order."""
    return [
        name
        for name, info in model.model_fields.items()
        if (info.json_schema_extra or {}).get("positional")
    ]


class StageOptions(Options):
    """What every stage has."""

    out: str = opt(
        "", "Folder to write; in a recipe, the stage's name inside `run_dir`.", identity=False
    )
    overwrite: bool = opt(False, "Start over where the folder holds other work.", identity=False)


class TargetOptions(Options):
    """Which target model."""

    target: str | None = opt(
        None,
        "Local folder, Hugging Face id, or `pkg:PACKAGE/FILE.gguf` inside an installed package. "
        "Left out after `prepare`: the one that made the inputs.",
        identity=False,
    )
    revision: str | None = opt(None, "Revision of a Hugging Face id.", identity=False)
    trust_remote_code: bool = opt(
        False, "Run the code that the target's repository brings along.", identity=False
    )


class CacheOptions(Options):
    """Where slices of a store below a URL are kept."""

    cache_dir: str | None = opt(
        None, "Folder of the local cache; None: `paceline` in the user's cache.", identity=False
    )
    cache_bytes: int = opt(
        64 << 30,
        "Bytes of remote stores that are kept; those opened longest ago go first.",
        identity=False,
        ge=1,
    )


class PrepareOptions(StageOptions, TargetOptions):
    """`prepare`: conversations to a token data set with an exact loss mask."""

    data: list[str] = opt(
        [],
        "Files of conversations: .jsonl, .json, .parquet, each also .gz; with `messages`, "
        "`conversations`, `input_ids` + `loss_mask` or `prompt_ids` + `response_ids`.",
        identity=False,
    )
    chat_template: str | None = opt(
        None, "File with a Jinja chat template, in place of the tokenizer's own."
    )
    chat_template_kwargs: dict[str, Any] = opt(
        {}, "Variables for the chat template, such as `enable_thinking: false`; recorded."
    )
    system_prompt: str | None = opt(
        None, "System message of conversations that have none; recorded."
    )
    begin_token: Literal["once", "template"] = opt(
        "once",
        "`once`: the tokenizer's begin token stands in front also where the template prints none; "
        "`template`: exactly what the template prints, as vLLM's chat API has it.",
    )
    max_length: int = opt(4096, "Longest sample in tokens; longer ones are cut.", ge=4)
    heldout_share: Share = opt(0.05, "Share of the conversations kept for evaluation, by hash.")
    split: Literal["auto", "train", "heldout"] = opt(
        "auto", "`auto`: by `heldout_share`; else all rows go to this split."
    )
    limit: int | None = opt(None, "Use only the first N rows of the data.", ge=1)
    source_weights: dict[str, float] = opt(
        {}, "Share of the rows to keep of each source (0 to 1); sources not named are kept whole."
    )
    deduplicate: bool = opt(True, "Drop conversations whose content was seen before.")
    strict: bool = opt(False, "Any row that cannot be used makes the run fail.", identity=False)
    max_skipped_share: Share = opt(
        0.5, "Fail when more than this share of the rows had to be skipped.", identity=False
    )
    num_workers: int | None = opt(
        None, "Threads of the tokenizer; None: all cores.", identity=False, ge=1
    )


class GenerateOptions(StageOptions, TargetOptions):
    """`generate`: on-policy answers by the target itself, exact token ids kept."""

    data: list[str] = opt(
        [], "Files of conversations or prompts (`messages`, `turns` or `prompt`).", identity=False
    )
    engine: Literal["transformers", "vllm", "openai"] = opt("transformers", "What runs the target.")
    server: str | None = opt(None, "Base URL of the server of engine `openai`.", identity=False)
    api_key: str | None = opt(
        None, "Key for the server; None: the environment's OPENAI_API_KEY.", identity=False
    )
    served_model: str | None = opt(None, "Model name at the server; None: the only one it has.")
    server_api: Literal["completions", "chat"] = opt(
        "completions",
        "What engine `openai` calls: completions take exact token ids, chat takes messages.",
    )
    server_extensions: bool = opt(
        True,
        "Ask the server for token ids and special tokens (vLLM's and SGLang's own fields); false "
        "for servers that refuse unknown fields.",
    )
    self_prompt: int = opt(0, "Let the target write this many user turns of its own first.", ge=0)
    self_prompt_max_tokens: int = opt(80, "Longest user turn that the target writes.", ge=4)
    self_prompt_temperature: float = opt(1.0, "Temperature of those user turns.", gt=0.0)
    self_prompt_top_p: float = opt(0.98, "Nucleus of those user turns.", gt=0.0, le=1.0)
    max_new_tokens: int = opt(256, "Longest answer in tokens.", ge=1)
    record_past_end: int = opt(
        0,
        "Tokens recorded past each answer's end, end of turn ignored; exact evaluation of a "
        "chain of K needs K of them.",
        ge=0,
    )
    temperature: float = opt(0.0, "0: greedy; above: sampled.", ge=0.0)
    top_p: float = opt(1.0, "Nucleus of sampled answers.", gt=0.0, le=1.0)
    seed: int = opt(0, "Seed of sampled answers.")
    chat_template: str | None = opt(None, "File with a Jinja chat template.")
    chat_template_kwargs: dict[str, Any] = opt({}, "Variables for the chat template; recorded.")
    system_prompt: str | None = opt(
        None, "System message of conversations that have none; recorded."
    )
    begin_token: Literal["once", "template"] = opt(
        "once",
        "`once`: the tokenizer's begin token stands in front also where the template prints none; "
        "`template`: exactly what the template prints, as vLLM's chat API has it.",
    )
    limit: int | None = opt(None, "Use only the first N rows of the data.", ge=1)
    dtype: Dtype = opt("auto", "Dtype of the target's weights while generating.")
    device: str = opt("auto", "Device of engine `transformers`.", identity=False)
    batch_size: int = opt(
        16, "Conversations in one batch of engine `transformers`.", identity=False, ge=1
    )
    concurrency: int = opt(32, "Requests at a time of engine `openai`.", identity=False, ge=1)
    max_retries: int = opt(
        6, "Tries again per request after 429, 5xx and time-outs.", identity=False, ge=0
    )
    request_timeout_s: float = opt(
        600.0, "Longest wait for one answer, seconds.", identity=False, gt=0
    )
    engine_options: dict[str, Any] = opt(
        {}, "Further arguments of the engine's constructor (vLLM's own names).", identity=False
    )


class ExtractOptions(StageOptions, TargetOptions):
    """`extract`: verified hidden states of chosen layers into a store."""

    data: str = opt("", "Folder that `prepare` wrote.", identity=False)
    staging: str | None = opt(
        None,
        "Local folder where a store is made whose `out` is a URL of fsspec (`s3://bucket/store`); "
        "it goes once all is uploaded. None: inside the user's cache.",
        identity=False,
    )
    layers: list[int] | None = opt(
        None,
        "Auxiliary hidden-state indices k (k = 0: embedding output, k = n: last layer before the "
        "final norm); None: 2, n // 2, n - 3.",
    )
    layer_convention: Literal["hidden_state_index", "layer_output"] = opt(
        "hidden_state_index",
        "What `layers` counts: k itself, or X of 'output of layer X' (k = X + 1).",
    )
    engine: Literal["transformers", "vllm"] = opt("transformers", "What runs the target.")
    dtype: Dtype = opt(
        "auto", "Dtype of weights and states; auto: the target's on GPUs, the faster on a CPU."
    )
    codec: Literal["raw", "lossless", "int8", "fp8"] = opt("raw", "How states are stored.")
    device: str = opt("auto", "Device of engine `transformers`.", identity=False)
    max_batch_tokens: int = opt(
        2048, "Tokens in one forward pass, padding included.", identity=False, ge=1
    )
    workers: int = opt(
        1,
        "Engines of `vllm` that share the work on this machine, each with GPUs of its own "
        "(tensor_parallel_size x pipeline_parallel_size of them).",
        identity=False,
        ge=1,
    )
    ray_address: str | None = opt(
        None,
        "Run the `workers` of engine `vllm` as Ray actors of this cluster (`auto`: the running "
        "one); needs the extra `ray` and a folder that all nodes see.",
        identity=False,
    )
    shard_bytes: int = opt(
        1 << 30,
        "Size at which a shard is closed, bytes; with `stream_bytes` at most an eighth of it.",
        identity=False,
        ge=1,
    )
    stream_bytes: int | None = opt(
        None,
        "Bytes of shards that may stand in `out`. When they do, extract waits for a `train "
        "--follow` that reads along, and removes what that has passed; held-out samples stay. "
        "None: everything stays.",
        identity=False,
        ge=1,
    )
    probe_samples: int = opt(4, "Samples that the probe runs before bulk work.", ge=1)
    reference_layers: int | None = opt(
        None,
        "Decoder layers of the plain transformers forward that the probe compares with, the first "
        "ones of the target; None: all where they fit into free memory, else 4.",
        identity=False,
        ge=1,
    )
    waive_reference: bool = opt(
        False,
        "Do without the probe's comparison with a plain transformers forward (a target too "
        "large for it); the manifest says so.",
    )
    max_quarantined_share: Share = opt(
        0.01, "Stop when more than this share of the samples is bad.", identity=False
    )
    engine_options: dict[str, Any] = opt(
        {}, "Further arguments of the engine's constructor (vLLM's own names).", identity=False
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
    qk_norm: bool = opt(False, "Norms on queries and keys (Qwen3 style).")
    aux_norm: Literal["rms", "static", "none"] = opt(
        "rms",
        "Norm of each auxiliary state before `fc`: a trained RMSNorm (vLLM >= 0.22), a "
        "fixed scale folded into `fc` at export (any server), or none.",
    )
    norm_output: bool = opt(False, "Feed the normed state to the next step (EAGLE-3.1).")
    init: Literal["target", "random"] = opt(
        "target", "Starting values: the target's last layer and head rows, or random."
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
        "Draft to train further: a folder of `train`, or a server's checkpoint made elsewhere. Its "
        "shape and its vocabulary are kept; `draft` and `vocab` are not read then.",
        identity=False,
    )
    start_form: Literal["vllm", "speculators", "sglang"] | None = opt(
        None, "Which server's form such a checkpoint is in; None: as its config says."
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
    epochs: float = opt(1.0, "Passes over the supervised rows.", gt=0)
    max_steps: int | None = opt(None, "Optimiser steps; takes the place of `epochs`.", ge=1)
    batch_rows: int = opt(
        1024, "Supervised rows in one optimiser step, over all ranks and accumulation.", ge=1
    )
    micro_batch_tokens: int = opt(
        16384, "Most tokens in one forward pass; more are accumulated.", identity=False, ge=1
    )
    learning_rate: float = opt(4e-3, "Peak learning rate.", gt=0)
    warmup_steps: int = opt(20, "Optimiser steps of linear warm-up.", ge=0)
    schedule: Literal["cosine", "linear", "constant"] = opt("cosine", "Decay after the warm-up.")
    min_lr_ratio: float = opt(0.03, "Learning rate at the end as a share of the peak.", ge=0, le=1)
    optimiser: Literal["adamw", "muon"] = opt(
        "adamw",
        "adamw, or muon for the matrices of fusion and layers (its steps are scaled to the size of "
        "AdamW's) with adamw for the head and the gains.",
    )
    betas: tuple[float, float] = opt((0.9, 0.95), "AdamW betas.")
    weight_decay: float = opt(0.0, "Weight decay of matrices.", ge=0)
    max_grad_norm: float = opt(1.0, "Gradients are clipped to this norm.", gt=0)
    seed: int = opt(0, "Seed of weights and data order.")
    dtype: Dtype = opt("auto", "Dtype of the arithmetic; weights are kept in float32.")
    device: str = opt("auto", "Device.", identity=False)
    logit_chunk: int = opt(
        2048, "Teacher positions whose logits are in memory at a time.", identity=False, ge=1
    )
    log_every: int = opt(10, "Optimiser steps between log records.", identity=False, ge=1)
    checkpoint_every: int = opt(200, "Optimiser steps between checkpoints.", identity=False, ge=1)
    eval_every: int | None = opt(
        None,
        "Optimiser steps between held-out losses; None: at the end only.",
        identity=False,
        ge=1,
    )
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = opt(
        [], "Where log records go besides `log.jsonl`.", identity=False
    )


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


class EvaluateOptions(StageOptions, TargetOptions, CacheOptions):
    """`evaluate`: acceptance length, server-free, in real decoding or in a server."""

    draft: str = opt(
        "", "Folder that `train` wrote, or a server's checkpoint made elsewhere.", identity=False
    )
    draft_form: Literal["vllm", "speculators", "sglang"] | None = opt(
        None, "Which server's form a checkpoint made elsewhere is in; None: as its config says."
    )
    store: str = opt("", "Store whose answers are walked (mode chain).", identity=False)
    data: str = opt(
        "", "Token data set whose prompts are answered (modes decode, served).", identity=False
    )
    prompts: list[str] = opt(
        [],
        "Prompt sets in place of `data`: .jsonl files of `turns` (or `prompt`), a set per file, as "
        "MT-Bench's question.jsonl.",
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
        if self.server and self.mode != "served":
            raise ValueError("server: only mode served asks one")
        if self.temperature and self.mode == "served":
            raise ValueError("temperature: mode served is greedy, so that outputs can be compared")
        return self


class ExportOptions(StageOptions, TargetOptions):
    """`export`: a checkpoint that a server loads, re-loaded and compared."""

    draft: str = opt(
        "", "Folder that `train` wrote, or a server's checkpoint made elsewhere.", identity=False
    )
    draft_form: Literal["vllm", "speculators", "sglang"] | None = opt(
        None, "Which server's form a checkpoint made elsewhere is in; None: as its config says."
    )
    server: list[Literal["vllm", "speculators", "sglang"]] = opt(
        ["vllm"], "Forms to write, each in a folder of its own.", min_length=1
    )
    server_version: dict[Literal["vllm", "speculators", "sglang"], str] = opt(
        {},
        "Release that is to serve a form, with three numbers such as `vllm: 0.22.0` (speculators: "
        "vLLM's): a draft that it cannot carry is refused.",
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


class InspectOptions(CacheOptions):
    """`inspect`: what an artefact folder holds, and whether it is whole."""

    folder: str = opt(
        "", "Folder that a stage of paceline wrote, or the URL of a store.", positional=True
    )
    verify: bool = opt(False, "Read everything and compare it with its checksums.")
    sample: str | None = opt(None, "Id of the sample to show decoded; None: the first one.")


class WatchOptions(Options):
    """`watch`: what a running job does: throughput, waits, curves."""

    folder: str = opt("", "Folder of a run, or of one stage.", positional=True)
    once: bool = opt(False, "Show it once, also on a terminal.")
    interval_s: float = opt(2.0, "Seconds between two looks.", gt=0)


STAGES = ("generate", "prepare", "extract", "align", "train", "evaluate", "export", "report")


class Recipe(Options):
    """`run`: a whole line in one file. Each stage's inputs are the folders before it."""

    run_dir: str = opt("runs/default", "Folder of all stages' folders.")
    target: str = opt("", "The target; see `paceline prepare --help`.")
    revision: str | None = opt(None, "Revision of a Hugging Face id.")
    trust_remote_code: bool = opt(False, "Run the code that the target's repository brings along.")
    overlap: bool = opt(
        False,
        "Train while `extract` still runs, in one process. `extract.stream_bytes` left out: half "
        "of what is free on the disk.",
    )
    prepare: PrepareOptions = Field(default_factory=PrepareOptions)
    generate: GenerateOptions | None = Field(None, description="Left out: data are on-policy.")
    extract: ExtractOptions = Field(default_factory=ExtractOptions)
    align: AlignOptions = Field(default_factory=AlignOptions)
    train: TrainOptions = Field(default_factory=TrainOptions)
    evaluate: EvaluateOptions = Field(default_factory=EvaluateOptions)
    export: ExportOptions = Field(default_factory=ExportOptions)
    report: ReportOptions = Field(default_factory=ReportOptions)


class RunOptions(Options):
    """`run`: all stages of a recipe, in order; finished ones are skipped."""

    recipe: str | Recipe = opt("", "Recipe: a YAML file.", positional=True)
    overrides: list[str] = opt(
        [], "Changes to the recipe, such as `train.epochs=2`.", positional=True
    )


class PlanOptions(RunOptions):
    """`plan`: bytes, files, minutes and memory of a recipe, before anything is spent."""

    out: str = opt("", "File for the plan; left out: `plan.json` inside `run_dir`.")
    measure: bool = opt(False, "Run each costly stage on a few samples here, for its real rate.")
    measure_tokens: int = opt(8192, "Tokens that the measured run extracts.", ge=64)
    measure_steps: int = opt(24, "Optimiser steps that the measured run makes.", ge=8)
    sample_rows: int = opt(1000, "Rows of the data that are read closely.", ge=1)
    rows: int | None = opt(None, "Assume so many conversations in place of reading data.", ge=1)
    tokens_per_row: int = opt(1024, "Tokens of each, where `rows` are assumed.", ge=4)
    supervised_share: Share = opt(0.5, "Supervised share of them, where `rows` are assumed.")
    answer_tokens: int | None = opt(
        None,
        "Mean length of the answers that `generate` will write; None: as measured, else the "
        "longest that it allows.",
        ge=1,
    )
    flops: float | None = opt(
        None,
        "Arithmetic of one device, FLOP per second of large matrix products; None: timed here.",
        gt=0,
    )
    devices: int = opt(1, "Devices that share the work of extraction and training.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = opt(
        "auto", "What the stages will run on; auto: what this machine has."
    )
    price_per_hour: float | None = opt(None, "Price of one device for one hour.", ge=0)


class DoctorOptions(Options):
    """`doctor`: what is installed, which engines work, which devices and how much disk there is."""

    folder: str = opt(".", "Folder whose disk is looked at.", positional=True)


class ImportStoreOptions(StageOptions, TargetOptions):
    """`import-store`: hidden states that other tools wrote, a file a sample, into a store."""

    source: str = opt(
        "",
        "Folder of others' files: `rows_A-B/data_N.pt` (.ckpt, .ckpt.gz), `data_N.pt` or "
        "`hs_N.safetensors`, `data_config.json` beside them.",
        positional=True,
        identity=False,
    )
    data: str = opt(
        "",
        "Folder that `prepare` wrote with the same token ids: gives samples their names, splits "
        "and loss masks. Needed where the files hold no masks.",
        identity=False,
    )
    layers: list[int] | None = opt(
        None,
        "Layer ids of the states in the order of the files, that of the last state too where it "
        "is one of a list; None: as data_config.json says.",
    )
    layer_convention: (
        Literal[
            "hidden_state_index",
            "layer_output",
            "transformers",
            "vllm",
            "sglang",
            "speculators_0.3",
            "speculators_0.9",
        ]
        | None
    ) = opt(None, "How those ids count (docs/concepts.md); None: as data_config.json names it.")
    last_norm: Literal["pre", "post"] | None = opt(
        None,
        "Whether the last state was taken before or after the final norm; None: as "
        "data_config.json says, before it for speculators' conventions.",
    )
    codec: Literal["raw", "lossless", "int8", "fp8"] = opt("raw", "How states are stored.")
    shard_bytes: int = opt(1 << 30, "Size at which a shard is closed, bytes.", identity=False, ge=1)
    heldout_share: Share = opt(
        0.05, "Share kept for evaluation, by hash of the prompt; not used with `data`."
    )
    check_samples: int = opt(
        4, "Samples that are compared with a plain transformers forward first.", ge=1
    )
    waive_reference: bool = opt(
        False,
        "Do without that comparison (a target too large for it); the manifest says so.",
    )
    max_quarantined_share: Share = opt(
        0.01, "Fail when more than this share of the files is bad.", identity=False
    )


class ExportStoreOptions(StageOptions):
    """`export-store`: a store as files that other tools read, one a sample."""

    store: str = opt("", "Folder that `extract` wrote.", identity=False, positional=True)
    layout: Literal["eagle", "speculators_0.3", "speculators_0.9"] = opt(
        "speculators_0.9",
        "eagle: `rows_A-B/data_N.ckpt`; speculators_0.3: `data_N.pt`; speculators_0.9: "
        "`hs_N.safetensors`.",
    )
    split: Literal["train", "heldout"] | None = opt(None, "Only this split; None: all.")
    limit: int | None = opt(None, "Only the first N samples.", ge=1)
    compress: bool = opt(False, "`.ckpt.gz` in place of `.ckpt` (layout eagle).")


class MergeStoresOptions(StageOptions):
    """`merge-stores`: one store from several of one target."""

    stores: list[str] = opt([], "Folders that `extract` wrote.", identity=False, positional=True)
    shard_bytes: int = opt(1 << 30, "Size at which a shard is closed, bytes.", identity=False, ge=1)


class SubsetStoreOptions(StageOptions):
    """`subset-store`: some samples of a store as a store of their own, or all in another codec."""

    store: str = opt("", "Folder that `extract` wrote.", identity=False, positional=True)
    split: Literal["train", "heldout"] | None = opt(None, "Only this split.")
    sources: list[str] = opt([], "Only samples of these sources.")
    ids: list[str] = opt([], "Only samples with these ids.")
    ids_file: str = opt("", "File of ids, one a line; like `ids`.")
    limit: int | None = opt(None, "Only the first N of what is left.", ge=1)
    codec: Literal["raw", "lossless", "int8", "fp8"] | None = opt(
        None, "Store the states anew in this codec; None: their bytes as they are."
    )
    shard_bytes: int = opt(1 << 30, "Size at which a shard is closed, bytes.", identity=False, ge=1)


class DeleteSamplesOptions(Options):
    """`delete-samples`: take samples out of a store for good."""

    store: str = opt("", "Folder that `extract` wrote.", positional=True)
    ids: list[str] = opt([], "Ids of the samples.")
    ids_file: str = opt("", "File of ids, one a line; like `ids`.")


class UpgradeStoreOptions(Options):
    """`upgrade-store`: a store that an earlier paceline wrote, brought up to date."""

    store: str = opt("", "Folder that `extract` wrote.", positional=True)


class UploadStoreOptions(Options):
    """`upload-store`: a finished store to an object store, or wherever fsspec writes."""

    store: str = opt("", "Folder that `extract` wrote.", positional=True)
    url: str = opt("", "Where it goes, as `s3://bucket/store`.", positional=True)
    overwrite: bool = opt(False, "Clear what another store or upload left there.")


class CodecReportOptions(StageOptions, TargetOptions):
    """`codec-report`: what each codec costs: bytes, errors, KL and acceptance length."""

    store: str = opt("", "Store of codec `raw` or `lossless`.", identity=False)
    vocab: str = opt("", "Folder that `align` wrote; not needed for `steps` 0.", identity=False)
    codecs: list[Literal["lossless", "int8", "fp8"]] = opt(
        ["lossless", "int8", "fp8"], "What is compared with raw.", min_length=1
    )
    samples: int | None = opt(
        None, "Use the first N samples of each split; None: the whole store.", ge=1
    )
    kl_rows: int = opt(8192, "Last states whose distributions are compared.", ge=1)
    steps: int = opt(
        300, "Optimiser steps of the draft that is trained on each codec; 0: none.", ge=0
    )
    ttt_steps: int = opt(3, "Training-time-test steps.", ge=1)
    batch_rows: int = opt(256, "Supervised rows in one optimiser step.", ge=1)
    learning_rate: float = opt(2e-3, "Peak learning rate.", gt=0)
    warmup_steps: int = opt(20, "Optimiser steps of linear warm-up.", ge=0)
    num_draft_tokens: list[int] = opt([1, 3, 5], "Chain lengths K.", min_length=1)
    seed: int = opt(0, "Seed of weights and data order.")
    dtype: Dtype = opt("auto", "Dtype of the training's arithmetic.")
    device: str = opt("auto", "Device.", identity=False)


def build(model: type[Options], values: dict[str, Any], where: str = "options") -> Any:
    """Validate options; all problems are told in one UsageError, by name."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [f"  {_problem(model, e['loc'], e['type'], e['msg'])}" for e in error.errors()]
        raise UsageError(f"{where}:\n" + "\n".join(lines)) from error


def _problem(model: type[Options], place: tuple[int | str, ...], kind: str, text: str) -> str:
    name = ".".join(map(str, place)) or model.__name__
    if kind != "extra_forbidden":
        return f"{name}: {text.removeprefix('Value error, ')}"
    known = _options_at(model, place[:-1])
    close = difflib.get_close_matches(str(place[-1]), known, n=1)
    return f"{name}: no such option" + (f"; did you mean {close[0]}?" if close else "")


def _options_at(model: type[Options], place: tuple[int | str, ...]) -> list[str]:
    """Names of the options of the group at `place`, a path of group names."""
    for name in place:
        kind = model.model_fields[str(name)].annotation
        # A group that may be left out is a union of its model and None.
        model = next(t for t in (kind, *get_args(kind)) if isinstance(t, type))
    return list(model.model_fields)


def load_recipe(path: str | Path, overrides: list[str] = ()) -> Recipe:
    """Read a YAML recipe and apply dotted overrides such as `train.learning_rate=1e-3`.

    Raises UsageError that names the file, or the override, and every problem in it.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: no such recipe")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: a recipe is a mapping of option names")
    return _with_overrides(values, overrides, where=str(path))


def override_recipe(recipe: Recipe, overrides: list[str]) -> Recipe:
    """A recipe with dotted overrides applied; what was left open stays open."""
    return _with_overrides(recipe.model_dump(exclude_unset=True), overrides, where="recipe")


def _with_overrides(values: dict[str, Any], overrides: list[str], where: str) -> Recipe:
    for override in overrides:
        _apply(values, override)
    return build(Recipe, values, where=where)


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise UsageError(f"override {override!r}: write NAME.NAME=VALUE")
    *groups, leaf = name.split(".")
    for group in groups:
        if values.get(group) is None:
            values[group] = {}
        values = values[group]
        if not isinstance(values, dict):
            raise UsageError(f"override {override!r}: {group} is not a group of options")
    try:
        values[leaf] = parse_scalar(text)
    except yaml.YAMLError as error:
        raise UsageError(f"override {override!r}: {text!r} is not a value: {error}") from error


def parse_scalar(text: str) -> Any:
    """A value as YAML says it, numbers such as 1e-3 included."""
    # YAML 1.1 reads 1e-3 as a string; people mean the number.
    try:
        return float(text) if "e" in text.lower() and "." not in text else yaml.safe_load(text)
    except ValueError:
        return yaml.safe_load(text)
