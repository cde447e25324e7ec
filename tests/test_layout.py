"""The house holds: imports go one way, stages know nothing of each other, torch loads late."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
STAGES = {"prepare", "extract", "align", "train", "evaluate", "export", "report"}
# What stands above the stages and may use all of them.
ABOVE = {"run", "ahead", "inspect", "exchange", "codec_report", "plan", "doctor", "watch", "cli"}
ABOVE |= {"__init__", "__main__"}
FOUNDATION = {"errors", "contracts", "fingerprint", "recipe", "artefact", "progress", "verbs"}


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = _modules()


def _imports(path: Path) -> Iterator[str]:
    """Dotted names of every import in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.removeprefix("paceline.") in MODULES
                yield inner if is_module else node.module or ""


def _own_imports(module: str) -> set[str]:
    """The modules of paceline that a module imports, the most exact name of each."""
    found = set()
    for name in _imports(MODULES[module]):
        inner = name.removeprefix("paceline.")
        if inner in MODULES and inner != module and name != inner:
            found.add(inner)
    return found


GRAPH = {module: _own_imports(module) for module in MODULES}


def _unit(module: str) -> str:
    return module.split(".")[0]


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of a graph, or an empty list."""
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(node: str) -> list[str]:
        state[node] = 1
        path.append(node)
        for after in sorted(graph[node]):
            if state.get(after) == 1:
                return [*path[path.index(after) :], after]
            if after not in state and (found := visit(after)):
                return found
        path.pop()
        state[node] = 2
        return []

    for node in sorted(graph):
        if node not in state and (found := visit(node)):
            return found
    return []


def test_the_walk_sees_imports():
    assert "artefact" in GRAPH["align"]
    assert "paceline.run".removeprefix("paceline.") in GRAPH
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert _cycle({"a": {"b"}, "b": set()}) == []


def test_no_import_cycle_between_modules():
    # A package's __init__ re-exports its own modules; they must not import it back.
    assert _cycle(GRAPH) == []


def test_no_import_cycle_between_parts():
    units: dict[str, set[str]] = {}
    for module, targets in GRAPH.items():
        own = units.setdefault(_unit(module), set())
        own |= {_unit(t) for t in targets} - {_unit(module)}
    assert _cycle(units) == []


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_no_stage_imports_another(stage):
    wrong = {
        module: sorted(t for t in targets if _unit(t) in STAGES - {stage})
        for module, targets in GRAPH.items()
        if _unit(module) == stage
    }
    assert {m: t for m, t in wrong.items() if t} == {}


def test_libraries_import_neither_stages_nor_what_stands_above_them():
    wrong = {
        module: sorted(t for t in targets if _unit(t) in STAGES | ABOVE)
        for module, targets in GRAPH.items()
        if _unit(module) not in STAGES | ABOVE
    }
    assert {m: t for m, t in wrong.items() if t} == {}


def test_nothing_imports_the_command_line():
    wrong = [
        m for m, targets in GRAPH.items() if _unit(m) != "cli" and "cli" in map(_unit, targets)
    ]
    assert wrong == ["__main__"]


def test_the_foundation_stands_on_itself():
    wrong = {
        module: sorted(t for t in targets if _unit(t) not in FOUNDATION)
        for module, targets in GRAPH.items()
        if _unit(module) in FOUNDATION
    }
    assert {m: t for m, t in wrong.items() if t} == {}


def test_only_the_vllm_engines_import_vllm():
    users = {
        module
        for module, path in MODULES.items()
        if any(name.split(".")[0] == "vllm" for name in _imports(path))
    }
    allowed = ("extract.vllm", "answers.vllm", "evaluate.served", "vllm_process")
    assert {m for m in users if not m.startswith(allowed)} == set()


@pytest.mark.parametrize(
    "statement",
    ["import paceline", "import paceline.recipe, paceline.contracts", "import paceline.cli.main"],
)
def test_importing_loads_neither_torch_nor_transformers(statement):
    heavy = ("torch", "transformers", "vllm")
    code = f"{statement}; import sys; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_verb_is_a_function():
    verbs = ("prepare", "extract", "align", "train", "evaluate", "export", "report")
    for name in (*verbs, "run", "plan", "doctor"):
        assert callable(getattr(paceline, name)), name
    assert callable(paceline.generate)
    assert callable(paceline.inspect)
