"""The `report` stage: one self-contained HTML page out of a run's folders."""

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline import fingerprint
from paceline.artefact import describe_input, open_stage, write_atomically
from paceline.errors import UsageError
from paceline.recipe import ReportOptions
from paceline.report import charts, sections
from paceline.report.gather import RunRecord, gather

PAGE_FILE = "index.html"
_MODES = {
    "chain": "server-free: the draft's chains against the target's recorded greedy answers",
    "decode": "real speculative decoding with transformers",
    "served": "served by vLLM",
}


def run(options: ReportOptions) -> dict[str, Any]:
    """Write the page. Returns {"page": its path, "page_file", "bytes"}.

    Raises UsageError where `run_dir` holds no finished stage, or two of a kind.
    """
    if not options.run_dir:
        raise UsageError("report: pass `run_dir`, the folder that holds the stages' folders")
    record = gather(Path(options.run_dir))
    folder = Path(options.out or record.folder / "report")
    inputs = {
        name: describe_input(stage.folder, stage.manifest) for name, stage in record.stages.items()
    }
    with open_stage(folder, "report", inputs, options.identity(), options.overwrite) as stage:
        if not stage.done:
            page = render(record, options.title).encode()
            write_atomically(folder / PAGE_FILE, page)
            result = {"page_file": PAGE_FILE, "bytes": len(page)}
            stage.finish(result, content=fingerprint.of_file(folder / PAGE_FILE))
        return {**stage.result, "page": str(folder / PAGE_FILE)}


def render(record: RunRecord, title: str | None = None) -> str:
    """The page's HTML, with everything in it: style, figures, numbers."""
    environment = Environment(
        loader=PackageLoader("paceline", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (resources.files("paceline") / "report" / "page.css").read_text()
    template = environment.get_template("page.html.jinja")
    return template.render(
        title=title or f"EAGLE-3 draft for {sections.target_name(record)}",
        run_name=record.folder.resolve().name,
        style=Markup(style),
        tiles=sections.tiles(record),
        verdict=sections.verdict(record),
        acceptance=_acceptance(record),
        training=_training(record),
        vocabulary=_vocabulary(record),
        checks=sections.checks(record),
        probe=sections.probe_table(record),
        data_facts=sections.data_facts(record),
        data=sections.data_table(record.result("prepare")) if record.result("prepare") else None,
        times=charts.times_figure(record.seconds),
        serving=sections.serving(record),
        stages=sections.stage_table(record),
        inputs=sections.input_table(record),
        versions=sections.versions(record),
        options=sections.options(record),
    )


def _acceptance(record: RunRecord) -> dict[str, Any] | None:
    measured = record.result("evaluate")
    if not measured:
        return None
    figures = [
        charts.acceptance_by_length(measured),
        charts.acceptance_by_position(measured),
        charts.acceptance_by_source(measured, sections.headline_length(measured)),
    ]
    pooled = next(iter(measured["results"].values()))["pooled"]
    return {
        "definition": measured["definition"],
        "about": f"{pooled['conversations']:,} conversations of split {measured['split']}, "
        f"{_MODES[measured['mode']]}; dtype {measured['dtype']}",
        "table": sections.acceptance_table(measured),
        "sources": sections.source_table(measured),
        "figures": [figure for figure in figures if figure],
    }


def _training(record: RunRecord) -> dict[str, Any] | None:
    trained = record.result("train")
    if not trained:
        return None
    return {
        "facts": sections.draft_facts(record),
        "figures": charts.training_figures(record.log, trained["heldout"], trained["steps"]),
    }


def _vocabulary(record: RunRecord) -> dict[str, Any] | None:
    aligned = record.result("align")
    if not aligned:
        return None
    return {
        "facts": sections.vocabulary_facts(aligned),
        "figure": charts.coverage_figure(aligned),
    }
