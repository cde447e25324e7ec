"""All options of all stages: types, defaults and documentation, in this one place.

The command line and the Python functions are both made from these models; a recipe is one YAML
file of them. An option marked `identity=False` may change between two runs of the same work: it
decides how fast or where, never what.
"""

from paceline.recipe.base import (
    CacheOptions,
    Dtype,
    Options,
    Share,
    StageOptions,
    TargetOptions,
    build,
    opt,
    positional_options,
)
from paceline.recipe.data import GenerateOptions, PrepareOptions
from paceline.recipe.drafts import (
    AlignOptions,
    DraftOptions,
    EvaluateOptions,
    ExportOptions,
    ReplayOptions,
    ReportOptions,
    SpeedupOptions,
    TrainOptions,
)
from paceline.recipe.line import (
    STAGES,
    DoctorOptions,
    InspectOptions,
    PlanOptions,
    Recipe,
    RecipeOptions,
    RunOptions,
    WatchOptions,
    load_recipe,
    override_recipe,
    parse_scalar,
)
from paceline.recipe.states import (
    CodecReportOptions,
    DeleteSamplesOptions,
    ExportStoreOptions,
    ExtractOptions,
    ImportStoreOptions,
    MergeStoresOptions,
    SubsetStoreOptions,
    UpgradeStoreOptions,
    UploadStoreOptions,
)

__all__ = [
    "AlignOptions",
    "CacheOptions",
    "CodecReportOptions",
    "DeleteSamplesOptions",
    "DoctorOptions",
    "DraftOptions",
    "Dtype",
    "EvaluateOptions",
    "ExportOptions",
    "ExportStoreOptions",
    "ExtractOptions",
    "GenerateOptions",
    "ImportStoreOptions",
    "InspectOptions",
    "MergeStoresOptions",
    "Options",
    "PlanOptions",
    "PrepareOptions",
    "Recipe",
    "RecipeOptions",
    "ReplayOptions",
    "ReportOptions",
    "RunOptions",
    "STAGES",
    "Share",
    "SpeedupOptions",
    "StageOptions",
    "SubsetStoreOptions",
    "TargetOptions",
    "TrainOptions",
    "UpgradeStoreOptions",
    "UploadStoreOptions",
    "WatchOptions",
    "build",
    "load_recipe",
    "opt",
    "override_recipe",
    "parse_scalar",
    "positional_options",
]
