"""The report on codecs, at a small size: its figures against figures made here from the states."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.codec_report.loss import Pairs, kl_of
from paceline.errors import UsageError
from paceline.store import Store
from tests.lines import extracted
from tests.store.making import make_sample, make_spec, write_store

K = "3"


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codecs")
    extracted(folder)
    return folder


def report(line: Path, out: str, **options) -> dict:
    return paceline.codec_report(
        store=str(line / "store"),
        out=str(line / out),
        **{"vocab": str(line / "vocab"), "num_draft_tokens": [3], "dtype": "float32", **options},
    )


def test_the_figures_are_those_of_the_states(line: Path) -> None:
    result = report(line, "report", steps=4, warmup_steps=1, batch_rows=60)
    raw, coded = (Store(line / f"report/stores/{name}") for name in ("raw", "int8"))
    found = result["codecs"]["int8"]
    wanted = {k: [] for k in raw.spec.layers.all}
    for index in range(len(raw)):
        a, b = raw.read(index), coded.read(index)
        for i, k in enumerate(raw.spec.layers.aux):
            for row in range(1, len(a.aux)):
                plain, other = a.aux[row, i].double(), b.aux[row, i].double()
                wanted[k].append(float((other - plain).norm() / plain.norm()))
        for plain, other in zip(a.last.double(), b.last.double()):
            wanted[raw.spec.layers.last].append(float((other - plain).norm() / plain.norm()))
    for k, errors in wanted.items():
        assert found["errors"][f"k={k}"]["max"] == pytest.approx(max(errors), rel=1e-4)
        median = sorted(errors)[(len(errors) - 1) // 2]
        assert found["errors"][f"k={k}"]["median"] == pytest.approx(median, rel=1e-4)
    files = [p for p in (line / "report/stores/int8").rglob("*") if p.is_file()]
    tokens = sum(r.num_tokens for r in raw.records)
    assert found["bytes_per_token"] == sum(p.stat().st_size for p in files) / tokens
    full = 4 * 32 * 4  # four states of width 32 in float32
    assert found["share_of_four_states"] == pytest.approx(found["bytes_per_token"] / full)
    # Lossless is lossless, and costs nothing.
    same = result["codecs"]["lossless"]
    assert same["same_bits"]
    assert same["kl"]["mean"] == 0.0
    assert same["kl"]["top1_agreement"] == 1.0
    assert same["acceptance"]["trained"] == result["codecs"]["raw"]["acceptance"]["trained"]
    for name in ("int8", "fp8"):
        codec = result["codecs"][name]
        assert not codec["same_bits"]
        assert 0 < codec["kl"]["mean"] < 0.1
        for how in ("trained", "read"):
            assert 1.0 <= codec["acceptance"][how][K]["acceptance_length"] <= 4.0
    assert json.loads((line / "report/result.json").read_text()) == result
    assert paceline.inspect(str(line / "report"), verify=True)["verified"]


def test_kl_is_that_of_the_whole_vocabulary(line: Path) -> None:
    from transformers import AutoModelForCausalLM

    result = report(line, "errors", steps=0, codecs=["fp8"], kl_rows=10**6)
    assert "acceptance" not in result["codecs"]["fp8"]
    model = AutoModelForCausalLM.from_pretrained(line / "target", dtype=torch.float64)
    raw, coded = (Store(line / f"errors/stores/{name}") for name in ("raw", "fp8"))
    terms = []
    for index in range(len(raw)):
        states = [s.read(index).last.double() for s in (raw, coded)]
        p, q = (model.lm_head(model.model.norm(x)).softmax(-1) for x in states)
        terms += (p * (p.log() - q.log())).sum(-1).tolist()
    found = result["codecs"]["fp8"]["kl"]
    assert found["rows"] == len(terms)
    assert found["mean"] == pytest.approx(sum(terms) / len(terms), rel=1e-3)


def test_rows_for_kl_come_from_all_places_though_there_are_more_samples_than_rows(
    tmp_path: Path,
) -> None:
    samples = [make_sample(i, num_tokens=30) for i in range(60)]
    store = Store(write_store(tmp_path, make_spec(dtype="float32"), samples))
    places = {}
    for index in range(60):
        last = store.read(index).last
        for row, state in enumerate(last):
            places[state.numpy().tobytes()] = (index / 60, row / len(last))
    found = []

    class Head:
        weight = torch.empty(0)

        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            found.extend(places[row.numpy().tobytes()] for row in rows)
            return rows

    assert kl_of(Pairs(store, store), Head(), 40)["rows"] == 40
    assert found[:40] == found[40:]
    for shares in zip(*found):
        assert min(shares) < 1 / 3 and max(shares) > 2 / 3


def test_some_samples_of_each_split(line: Path) -> None:
    result = report(line, "few", steps=0, codecs=["int8"], samples=3)
    assert result["samples"] == 6
    splits = [r.split for r in Store(line / "few/stores/int8").records]
    assert sorted(splits) == ["heldout"] * 3 + ["train"] * 3


@pytest.mark.parametrize("wrong", [{"dtype": "float16"}, {"num_draft_tokens": [0]}])
def test_what_its_training_and_evaluation_refuse_is_refused_before_the_work(
    line: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=f"(?s)codec_report:.*{next(iter(wrong))}"):
        report(line, tmp_path / "no", **wrong)
    assert not list(tmp_path.iterdir())


def test_a_store_that_has_lost_digits_is_no_measure(line: Path) -> None:
    with pytest.raises(UsageError, match="stored as int8, which has lost digits"):
        paceline.codec_report(
            store=str(line / "few/stores/int8"), out=str(line / "no"), steps=0, codecs=["fp8"]
        )
    with pytest.raises(UsageError, match="`vocab`"):
        paceline.codec_report(store=str(line / "store"), out=str(line / "no"))
