"""Options of `prepare` and `generate`."""

from typing import Any, Literal, Self

from pydantic import model_validator

from paceline.recipe.base import Dtype, Share, StageOptions, TargetOptions, opt


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
        "auto",
        "`auto`: where a row's own `split` says (train or heldout), else by `heldout_share`; "
        "otherwise all rows go to this split.",
    )
    train_on_prompts: bool = opt(
        False,
        "Supervise the prompts of the training split too: the target has a distribution there as "
        "well, and more rows teach. Held-out samples keep to the answers.",
    )
    limit: int | None = opt(None, "Use only the first N rows of the data.", ge=1)
    source_weights: dict[str, Share] = opt(
        {},
        "Share of the rows to keep of each source (0 to 1); sources not named are kept whole, and "
        "a name that no row has is an error.",
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
        "Ask the server for token ids and special tokens, and for no sampling of its own (vLLM's "
        "and SGLang's fields); false for servers that refuse unknown fields.",
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

    @model_validator(mode="after")
    def _of_the_engine(self) -> Self:
        if self.server and self.engine != "openai":
            raise ValueError(f"server: engine {self.engine} asks none; say `engine` openai")
        return self
