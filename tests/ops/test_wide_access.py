"""Kernels move several values of a tensor at once. Triton does so only where it can prove where
rows and masks begin and end; an argument that hides it costs several times the time, in silence."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def accesses(tmp_path_factory) -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    found = subprocess.run(
        [sys.executable, "-m", "tests.ops.ptx"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def test_no_half_precision_value_is_moved_alone(accesses):
    assert len(accesses) == 14
    for kernel, seen in accesses.items():
        assert any("v4" in access or "v2" in access for access in seen), kernel
        alone = [access for access in seen if re.search(r"\.[bu](8|16)$", access)]
        # One scale serves many codes.
        assert not alone or (kernel == "dequantise" and alone == ["ld.global.b16"]), (kernel, seen)
