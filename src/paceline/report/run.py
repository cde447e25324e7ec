"""The `report` stage: one self-contained HTML page out of a run's folders."""

from collections.abc import Callable
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
from paceline.report.compare import Comparison, comparison
from paceline.report.failures import failures
from paceline.report.gather import RunRecord, gather
from paceline.report.planned import planned
from paceline.report.speed import speed

PAGE_FILE = "index.html"


def run(options: ReportOptions) -> dict[str, Any]:
    """Write the page. Returns {"page": its path, "page_file", "bytes"}.

    Raises UsageError where `run_dir` holds no finished stage, or two of a kind of which none is
    called as the stage.
    """
    if options.compare:
        return _compare(options)
    if options.runs or not options.run_dir:
        raise UsageError(
            "report: pass `run_dir`, the folder that holds the stages' folders; several runs are "
            "set side by side with `--compare RUN RUN`"
        )
    record = gather(Path(options.run_dir))
    folder = Path(options.out or record.folder / "report")
    return _write(options, folder, _inputs(record), lambda: render(record, options.title))


def _compare(options: ReportOptions) -> dict[str, Any]:
    if len(options.runs) < 2 or options.run_dir:
        raise UsageError("report: `--compare` takes two runs or more: report --compare RUN RUN")
    records = [gather(Path(run)) for run in options.runs]
    folder = Path(options.out or records[0].folder.resolve().parent / "compare")
    compared = comparison(records)
    inputs = {
        f"{name}.{stage}": entry
        for name, record in zip(compared.names, records, strict=True)
        for stage, entry in _inputs(record).items()
    }
    return _write(options, folder, inputs, lambda: render_comparison(compared, options.title))


def _inputs(record: RunRecord) -> dict[str, dict[str, Any]]:
    return {
        name: describe_input(stage.folder, stage.manifest) for name, stage in record.stages.items()
    }


def _write(
    options: ReportOptions,
    folder: Path,
    inputs: dict[str, dict[str, Any]],
    make: Callable[[], str],
) -> dict[str, Any]:
    with open_stage(folder, "report", inputs, options.identity(), options.overwrite) as stage:
        if not stage.done:
            page = make().encode()
            write_atomically(folder / PAGE_FILE, page)
            result = {"page_file": PAGE_FILE, "bytes": len(page)}
            stage.finish(result, content=fingerprint.of_file(folder / PAGE_FILE))
        return {**stage.result, "page": str(folder / PAGE_FILE)}


def render(record: RunRecord, title: str | None = None) -> str:
    """The page's HTML, with everything in it: style, figures, numbers."""
    return _rendered(
        "page.html.jinja",
        title=title or f"EAGLE-3 draft for {sections.target_name(record)}",
        run_name=record.folder.resolve().name,
        tiles=sections.tiles(record),
        verdict=sections.verdict(record),
        acceptance=_acceptance(record),
        speed=speed(record.result("evaluate")),
        failures=failures(record.result("evaluate")),
        planned=planned(record),
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


def render_comparison(compared: Comparison, title: str | None = None) -> str:
    """The HTML of a page that sets several runs side by side."""
    return _rendered(
        "compare.html.jinja",
        title=title or f"{len(compared.names)} drafts for {compared.target}",
        run_name=" and ".join(compared.names),
        **vars(compared),
    )


def _rendered(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("paceline", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (resources.files("paceline") / "report" / "page.css").read_text()
    return environment.get_template(template).render(style=Markup(style), **values)


def _acceptance(record: RunRecord) -> dict[str, Any] | None:
    measured = record.result("evaluate")
    if not measured:
        return None
    lengths = sorted(measured["results"], key=int)
    figures = [
        *charts.acceptance_figures(charts.methods_of(measured), lengths),
        charts.acceptance_by_source(measured, sections.headline_length(measured["results"])),
    ]
    return {
        "definition": measured["definition"],
        "about": sections.measured_on(measured),
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
        "figures": charts.training_figures(record.log),
    }


def _vocabulary(record: RunRecord) -> dict[str, Any] | None:
    aligned = record.result("align")
    if not aligned:
        return None
    return {
        "facts": sections.vocabulary_facts(aligned),
        "figure": charts.coverage_figure(aligned),
    }
