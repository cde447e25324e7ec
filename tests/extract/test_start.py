"""Every engine that captures a store is probed, once."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.errors import ProbeFailure
from paceline.extract import start
from paceline.extract.engine import EngineInfo
from paceline.extract.probe import ProbeResult
from paceline.recipe import ExtractOptions
from tests.store.making import make_spec

INFO = EngineInfo("vllm", "0.16.0", "bfloat16", {"device": "cuda:0", "kv_blocks": 900})


class Probes:
    """Stands in for the probe: counts, and says which one it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.fails = False
        self.scratch: list[Path] = []
        monkeypatch.setattr(start, "run_probe", self._run)
        monkeypatch.setattr(start, "choose_prompts", lambda *_: [])
        self.versions = {"torch": "2.10.0"}
        monkeypatch.setattr(start.fingerprint, "package_versions", lambda: self.versions)

    def _run(self, *args: object) -> ProbeResult:
        scratch = args[4]
        assert list(scratch.iterdir()) == []
        (scratch / "shard").write_bytes(b"probe's own")
        self.scratch.append(scratch)
        if self.fails:
            raise ProbeFailure("probe: layer k = 2 differs.")
        self.count += 1
        return ProbeResult(64, 64, 64, None, 0, ((0.0, float(self.count)),))

    def of(self, info: EngineInfo = INFO, **options: object) -> int:
        """Which probe's ranges a run with this engine goes by."""
        said = ExtractOptions(engine="vllm", waive_reference=True, **options)
        engine = SimpleNamespace(info=info)
        probe = start.ensure_probed(said, self.folder, engine, None, make_spec(), [])
        return int(probe["rms_ranges"][0][1])


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Probes:
    return Probes(monkeypatch, tmp_path)


def test_the_same_engine_is_probed_once(probes: Probes) -> None:
    assert probes.of() == 1
    before = (probes.folder / "start.json").read_bytes()
    assert probes.of() == 1
    # How much memory was free says nothing of how it computes.
    assert probes.of(replace(INFO, settings={**INFO.settings, "kv_blocks": 901})) == 1
    assert probes.count == 1
    assert (probes.folder / "start.json").read_bytes() == before


def test_what_changes_the_engine_has_it_probed_and_recorded(probes: Probes) -> None:
    others = [
        {"info": replace(INFO, version="0.32.0")},
        {"info": replace(INFO, settings={**INFO.settings, "device": "cpu"})},
        {"engine_options": {"hf_overrides": {"rope_theta": 1e6}}},
        {"engine_options": {"hf_overrides": {"rope_theta": 1e5}}},
    ]
    assert probes.of() == 1
    for number, other in enumerate(others, start=2):
        assert probes.of(**other) == number
    probes.versions = {"torch": "2.10.0", "transformers": "5.0.0"}
    assert probes.of() == 6
    # Whichever comes back was seen before.
    for number, other in enumerate(others, start=7):
        assert probes.of(**other) == number
    assert probes.of() == 6
    probes.versions = {"torch": "2.10.0"}
    assert [probes.of(**other) for other in [{}, *others]] == [1, 2, 3, 4, 5]
    found = start.read_start(probes.folder)
    assert found["dtype"] == "bfloat16"
    assert found["engine"]["version"] == "0.16.0"
    assert found["probe"]["rms_ranges"] == [[0.0, 1.0]]
    later = found["later_engines"]
    assert [e["probe"]["rms_ranges"][0][1] for e in later] == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert later[0]["engine"]["version"] == "0.32.0"
    assert later[2]["engine_options"] == {"hf_overrides": {"rope_theta": 1e6}}
    assert later[4]["versions"] == {"torch": "2.10.0", "transformers": "5.0.0"}


def test_another_engine_that_is_wrong_is_told_from_the_first(probes: Probes) -> None:
    assert probes.of() == 1
    before = (probes.folder / "start.json").read_bytes()
    probes.fails = True
    says = r"k = 2 differs\. .* another engine \(engine\.version: was '0.16.0', now '0.32.0'\)"
    with pytest.raises(ProbeFailure, match=says):
        probes.of(replace(INFO, version="0.32.0"))
    assert (probes.folder / "start.json").read_bytes() == before
    probes.fails = False
    assert probes.of(replace(INFO, version="0.32.0")) == 2


def test_a_store_that_was_begun_before_engines_were_compared_is_probed(probes: Probes) -> None:
    probes.of()
    path = probes.folder / "start.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({name: found[name] for name in ("dtype", "engine", "probe")}))
    assert probes.of() == 2
    assert len(start.read_start(probes.folder)["later_engines"]) == 1
    assert probes.of() == 2


def test_the_probes_store_lies_in_the_runs_folder_and_goes(probes: Probes) -> None:
    # Engines on other machines see no other folder of this one.
    killed = probes.folder / ".probe"
    killed.mkdir()
    (killed / "manifest.json").write_text("of a run that was killed")
    probes.of()
    probes.fails = True
    with pytest.raises(ProbeFailure):
        probes.of(replace(INFO, version="0.32.0"))
    killed.mkdir()
    probes.of()  # is not probed again
    assert [p.parent for p in probes.scratch] == [probes.folder] * 2
    assert [p.name for p in probes.folder.iterdir()] == ["start.json"]
