"""What the layers of this vLLM return, read in its own sources: no engine is started."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.extract.vllm.layers import FINISHED_STREAM

pytestmark = pytest.mark.engine_vllm


def test_layers_that_add_the_residual_themselves_are_known() -> None:
    found = {layer.name for layer in _layers() if _returns_residual(layer) and _adds_it(layer)}
    assert "CohereDecoderLayer" in found
    assert found <= set(FINISHED_STREAM)


def _layers() -> Iterator[ast.ClassDef]:
    """Decoder layers of all models but the drafts."""
    vllm = Path(find_spec("vllm").origin).parent
    for path in sorted((vllm / "model_executor" / "models").glob("*.py")):
        if not path.stem.endswith(("_mtp", "_eagle")):
            classes = (c for c in ast.parse(path.read_text()).body if isinstance(c, ast.ClassDef))
            yield from (c for c in classes if "Decoder" in c.name and c.name.endswith("Layer"))


def _forward(layer: ast.ClassDef) -> Iterator[ast.AST]:
    for method in layer.body:
        if isinstance(method, ast.FunctionDef) and method.name == "forward":
            yield from ast.walk(method)


def _returns_residual(layer: ast.ClassDef) -> bool:
    returned = [node.value for node in _forward(layer) if isinstance(node, ast.Return)]
    return any(isinstance(v, ast.Tuple) and _is_residual(v.elts[-1]) for v in returned)


def _adds_it(layer: ast.ClassDef) -> bool:
    """Whether `x = ... + residual` is there; fused norms add it without a plus."""
    sums = [
        node.value
        for node in _forward(layer)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
    ]
    return any(_is_residual(part) for whole in sums for part in ast.walk(whole))


def _is_residual(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "residual"
