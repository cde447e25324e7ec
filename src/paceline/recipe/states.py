"""Options of what makes, moves and looks after hidden states."""

from typing import Any, Literal, Self

from pydantic import PositiveInt, model_validator

from paceline.recipe.base import (
    Dtype,
    Options,
    Share,
    StageOptions,
    TargetOptions,
    TrainDtype,
    WarmupSteps,
    opt,
)


class ExtractOptions(StageOptions, TargetOptions):
    """`extract`: verified hidden states of chosen layers into a store."""

    data: str = opt("", "Folder that `prepare` wrote.", identity=False)
    staging: str | None = opt(
        None,
        "Local folder where a store is made whose `out` is a URL of fsspec (`s3://bucket/store`); "
        "it goes once all is uploaded. None: inside $PACELINE_CACHE, or the user's cache.",
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
        "one); needs the extra `ray`, and the store and the target where all nodes see them.",
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

    @model_validator(mode="after")
    def _of_the_engine(self) -> Self:
        if self.engine != "vllm" and (self.workers > 1 or self.ray_address):
            name = "ray_address" if self.ray_address else "workers"
            raise ValueError(f"{name}: engine {self.engine} is one; say `engine` vllm")
        return self


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
    warmup_steps: WarmupSteps = opt(
        0.15, "Optimiser steps of linear warm-up; below 1 a share of all steps."
    )
    num_draft_tokens: list[PositiveInt] = opt([1, 3, 5], "Chain lengths K.", min_length=1)
    seed: int = opt(0, "Seed of weights and data order.")
    dtype: TrainDtype = opt("auto", "Dtype of the training's arithmetic.")
    device: str = opt("auto", "Device.", identity=False)
