"""Extraction through transformers: every stored row against a plain forward, and refusals."""

import importlib
import json

import numpy as np
import pytest
import torch

import paceline
from paceline.contracts import LayerPlan, TokenSample
from paceline.errors import (
    DataError,
    DiskFullError,
    EngineError,
    FingerprintMismatch,
    LayerError,
    ProbeFailure,
    StoreCorruption,
    UsageError,
)
from paceline.extract.reference import relative_error
from paceline.extract.transformers_engine import TransformersEngine, length_buckets
from paceline.store import Store, published_ids
from paceline.target.model import final_norm_of, load_model
from paceline.target.spec import Target, TargetReference

from ..conftest import RealRun
from ..lines import TINY_LAYERS, extracted, prepared
from ..small_disk import small_disk
from ..targets import WRAPPED, model_class, save_long_rope, save_target

# `paceline.extract.run` is the stage's function; this is the module that holds it.
extract_run = importlib.import_module("paceline.extract.run")
extract_reference = importlib.import_module("paceline.extract.reference")
extract_quarantine = importlib.import_module("paceline.extract.quarantine")
extract_start = importlib.import_module("paceline.extract.start")


def worst_errors(store: Store, model, num_layers: int) -> dict[int, torch.Tensor]:
    """Row-relative errors per k of all stored rows to transformers' own forward, one sample at a
    time, unpadded; k = n from the final norm's input."""
    norm_input = []
    handle = final_norm_of(model, num_layers).register_forward_pre_hook(
        lambda _, args: norm_input.append(args[0][0])
    )
    errors = {k: [] for k in store.spec.layers.all}
    for i in range(len(store)):
        sample = store.read(i)
        norm_input.clear()
        with torch.no_grad():
            hidden = model(sample.input_ids[None].long(), output_hidden_states=True).hidden_states
        assert len(sample.aux) == int(np.flatnonzero(sample.loss_mask.numpy())[-1])
        for a, k in enumerate(store.spec.layers.aux):
            errors[k].append(relative_error(sample.aux[:, a], hidden[k][0][: len(sample.aux)]))
        errors[num_layers].append(relative_error(sample.last, norm_input[0][sample.loss_mask]))
    handle.remove()
    return {k: torch.cat(found) for k, found in errors.items()}


def test_every_stored_row_of_the_real_target_is_that_of_a_plain_forward(real_run: RealRun):
    store = Store(real_run.store)
    assert store.spec.layers == LayerPlan((2, 15, 27), 30)
    target = Target(TargetReference(**store.manifest.result["target"]))
    model = load_model(target, torch.float32, "cpu")
    for k, errors in worst_errors(store, model, 30).items():
        assert float(errors.max()) <= 5e-4, k
    probe = store.manifest.result["probe"]
    assert probe["num_greedy_rows"] >= 64
    assert probe["num_greedy_agree"] == probe["num_greedy_rows"]
    assert set(probe["errors"]) == {"k=2", "k=15", "k=27", "k=30"}


def test_bfloat16_rows_lie_within_their_bounds(real_run: RealRun, tmp_path):
    data = tmp_path / "rows.jsonl"
    lines = (real_run.generate / "answers").glob("*.jsonl")
    rows = [line for path in lines for line in path.read_text().splitlines()][:4]
    data.write_text("\n".join(rows) + "\n")
    store_manifest = Store(real_run.store).manifest
    target = store_manifest.result["target"]["target"]
    paceline.prepare(target=target, data=[str(data)], out=str(tmp_path / "data"))
    paceline.extract(
        data=str(tmp_path / "data"), out=str(tmp_path / "store"), dtype="bfloat16", probe_samples=2
    )
    store = Store(tmp_path / "store")
    model = load_model(Target(TargetReference(target)), torch.bfloat16, "cpu")
    for k, errors in worst_errors(store, model, 30).items():
        assert float(errors.median()) <= 0.03 and float(errors.quantile(0.99)) <= 0.08, k


@pytest.mark.parametrize("layers", [[0, 3, 8], [1], [0, 1, 2, 3, 4, 5, 6, 7, 8]], ids=str)
def test_every_k_from_0_to_n_can_be_had(tmp_path, layers):
    store = Store(extracted(tmp_path, layers=layers, max_batch_tokens=100))
    model = load_model(Target(TargetReference(str(tmp_path / "target"))), torch.float32, "cpu")
    norm_input = []
    final_norm_of(model, 8).register_forward_pre_hook(lambda _, a: norm_input.append(a[0][0]))
    for i in range(len(store)):
        sample = store.read(i)
        norm_input.clear()
        hidden = model(sample.input_ids[None].long(), output_hidden_states=True).hidden_states
        for a, k in enumerate(layers):
            plain = norm_input[0] if k == 8 else hidden[k][0]
            torch.testing.assert_close(sample.aux[:, a], plain[: len(sample.aux)])
        torch.testing.assert_close(sample.last, norm_input[0][sample.loss_mask])


@pytest.mark.parametrize("family", sorted(WRAPPED))
def test_the_language_model_inside_a_multimodal_one(tmp_path, family):
    target = save_target(tmp_path / "target", family)
    store = Store(extracted(tmp_path))
    probe = store.manifest.result["probe"]
    assert probe["num_greedy_agree"] == probe["num_greedy_rows"] >= 64
    assert probe["reference_layers"] == 8
    model = model_class(family).from_pretrained(target, dtype=torch.float32).eval()
    for k, errors in worst_errors(store, model, 8).items():
        assert float(errors.max()) <= 5e-4, k


def test_a_batch_has_no_part_in_the_rotary_frequencies_of_a_longrope_target(tmp_path):
    """transformers takes them by the longest row of a batch."""
    target = save_long_rope(tmp_path / "target", original=64)
    generator = np.random.default_rng(0)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i, length in enumerate([60, 66] * 4):
            ids = generator.integers(4, 260, length).tolist()
            row = {"id": f"r{i}", "prompt_ids": ids[:20], "response_ids": ids[20:]}
            file.write(json.dumps(row) + "\n")
    data = paceline.prepare(
        target=str(target), data=[str(tmp_path / "rows.jsonl")], out=str(tmp_path / "prepare")
    )
    options = {"layers": TINY_LAYERS, "dtype": "float32", "max_batch_tokens": 2048}
    paceline.extract(data=str(tmp_path / "prepare"), out=str(tmp_path / "store"), **options)
    model = load_model(Target(TargetReference(str(target))), torch.float32, "cpu")
    store = Store(tmp_path / "store")
    assert len(store) == data["samples"] == 8
    for errors in worst_errors(store, model, model.config.num_hidden_layers).values():
        assert float(errors.max()) < 1e-4


def test_samples_in_are_stored_or_skipped_by_reason(tmp_path):
    store = Store(extracted(tmp_path))
    accounting = store.manifest.result["accounting"]
    assert accounting == {"in": 30, "done": 30, "quarantined": {}, "skipped": {}}
    assert len(store) == 30


def test_data_of_which_no_sample_can_be_used_are_an_error(tmp_path):
    save_target(tmp_path / "target", max_position_embeddings=3)
    data = str(prepared(tmp_path, num_rows=6))
    out = tmp_path / "store"
    for _ in range(2):
        with pytest.raises(DataError, match=r"no sample .* used \(6: longer than the target's 3"):
            paceline.extract(data=data, out=str(out), layers=TINY_LAYERS, dtype="float32")
    assert not list(out.rglob("*.safetensors"))
    with pytest.raises(UsageError, match="has no manifest.json"):
        Store(out)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": [9]}, LayerError, "k = 9 is outside 0 .. 8"),
        ({"layers": None}, None, None),
        ({"layers": [4, 1]}, LayerError, "must ascend"),
        ({"layers": [-1], "layer_convention": "layer_output"}, LayerError, "does not exist"),
    ],
    ids=str,
)
def test_layers_are_checked_before_anything_runs(tmp_path, options, error, message):
    data = str(prepared(tmp_path, num_rows=4))
    call = lambda: paceline.extract(data=data, out=str(tmp_path / "store"), **options)
    if error is None:
        assert call()["store"]["aux_layers"] == [2, 4, 5]
        return
    with pytest.raises(error, match=message):
        call()
    assert not (tmp_path / "store").exists()


def test_E07_layers_may_be_given_as_outputs_of_layers(tmp_path):
    data = str(prepared(tmp_path, num_rows=4))
    result = paceline.extract(
        data=data, out=str(tmp_path / "s"), layers=[0, 3, 7], layer_convention="layer_output"
    )
    assert result["store"]["aux_layers"] == [1, 4, 8]


def test_data_of_another_target_are_refused_by_what_differs(tmp_path):
    data = prepared(tmp_path, num_rows=4)
    other = save_target(tmp_path / "other", vocab_size=330)
    with pytest.raises(FingerprintMismatch, match="config"):
        paceline.extract(target=str(other), data=str(data), out=str(tmp_path / "store"))


def test_a_store_that_cannot_fit_is_refused_before_the_start(tmp_path):
    """On a real disk of 70 MiB: 64 MiB are left free besides the store."""
    data = str(prepared(tmp_path, num_rows=200))
    says = r"200 samples needs about 0\.0\d GB more \(codec raw\), the disk has 0\.0\d GB free"
    with small_disk(tmp_path / "disk", "65m") as disk:
        with pytest.raises(DiskFullError, match=says):
            paceline.extract(data=data, out=str(disk / "store"), layers=TINY_LAYERS)
        assert not list((disk / "store").glob("shards/*"))
        # A quarter of the bytes fits: the codec counts.
        smaller = {"layers": TINY_LAYERS, "codec": "int8", "overwrite": True}
        result = paceline.extract(data=data, out=str(disk / "store"), **smaller)
        assert result["accounting"]["done"] == 200


def with_engine(patch: pytest.MonkeyPatch, kind: type) -> None:
    """Let `extract` run this engine."""
    make = lambda options, target, dtype, _: kind(options, target, dtype)
    patch.setattr(extract_run, "open_engine", make)


class _Wrong(TransformersEngine):
    """A real engine with one fault of the kind that trains happily."""

    fault = ""

    def __init__(self, options, target, dtype):
        super().__init__(options, target, dtype)
        if self.fault == "other rope theta":
            # The engine stays true to itself: only the outside look can tell.
            self.model.model.rotary_emb.inv_freq *= 0.5

    def capture(self, samples, plan, destination, on_tokens):
        shifts = {
            "off by one layer": LayerPlan(tuple(k + 1 for k in plan.aux), plan.last),
            "early last": LayerPlan(plan.aux, plan.last - 1),
        }
        if self.fault == "normed last":
            final_norm = final_norm_of(self.model, 8)
            self._decoder.layers[-1].register_forward_hook(lambda m, a, o: final_norm(o))
        if self.fault == "zero rows":
            self._decoder.layers[3].register_forward_hook(lambda m, a, o: o * 0.0)
        if self.fault == "not finite":
            self._decoder.layers[3].register_forward_hook(lambda m, a, o: o / 0.0)
        if self.fault == "shifted rows":
            self._decoder.layers[3].register_forward_hook(lambda m, a, o: o.roll(1, 1))
        super().capture(samples, shifts.get(self.fault, plan), destination, on_tokens)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("off by one layer", "layer k = 1 differs"),
        ("early last", "greedy token"),
        ("normed last", "layer k = 8 differs|greedy token"),
        ("zero rows", "all-zero row"),
        ("not finite", "not finite"),
        ("shifted rows", "layer k = 4 differs|greedy token"),
        ("other rope theta", "layer k = 1 differs"),
    ],
)
def test_the_probe_stops_an_engine_that_is_wrong(tmp_path, monkeypatch, fault, message):
    data = str(prepared(tmp_path, num_rows=8))
    with_engine(monkeypatch, type("Wrong", (_Wrong,), {"fault": fault}))
    with pytest.raises(ProbeFailure, match=message):
        paceline.extract(
            data=data, out=str(tmp_path / "store"), layers=TINY_LAYERS, dtype="float32"
        )
    assert not list((tmp_path / "store").rglob("*.safetensors"))


def test_a_target_that_does_not_fit_is_compared_with_its_first_layers(tmp_path, monkeypatch):
    data = str(prepared(tmp_path, num_rows=8))
    monkeypatch.setattr(extract_reference, "free_host_bytes", lambda: 10_000)
    # All of the plan's layers lie beyond the copy: where the copy ends is captured besides.
    common = {"data": data, "layers": [5, 6, 7], "dtype": "float32"}
    result = paceline.extract(out=str(tmp_path / "cut"), **common)
    assert result["probe"]["reference_layers"] == 4
    assert list(result["probe"]["errors"]) == ["k=4"]
    assert result["probe"]["errors"]["k=4"]["max"] < 1e-4
    assert len(result["probe"]["rms_ranges"]) == 4
    whole = paceline.extract(out=str(tmp_path / "whole"), reference_layers=8, **common)
    assert list(whole["probe"]["errors"]) == ["k=5", "k=6", "k=7", "k=8"]
    assert result["probe"]["rms_ranges"] == whole["probe"]["rms_ranges"]


def test_a_wrong_engine_is_caught_by_the_first_layers_alone(tmp_path, monkeypatch):
    data = str(prepared(tmp_path, num_rows=8))
    with_engine(monkeypatch, type("Wrong", (_Wrong,), {"fault": "other rope theta"}))
    with pytest.raises(ProbeFailure, match="layer k = 2 differs"):
        paceline.extract(
            data=data,
            out=str(tmp_path / "store"),
            layers=[5, 6, 7],
            dtype="float32",
            reference_layers=2,
        )


def test_bad_samples_are_quarantined_and_too_many_stop_the_run(tmp_path, monkeypatch):
    data = str(prepared(tmp_path, num_rows=20, heldout_share=0.0))

    class Dropping(TransformersEngine):
        def capture(self, samples, plan, destination, on_tokens):
            samples = list(samples)
            super().capture(samples[1:], plan, destination, on_tokens)
            with destination.open(1) as sink:
                width = destination.spec.hidden_size
                aux = torch.full((samples[0].num_aux_rows, len(plan.aux), width), float("nan"))
                last = torch.ones(samples[0].num_supervised, width)
                sink.add(samples[0], aux, last)

    real_probe = extract_start.run_probe
    monkeypatch.setattr(
        extract_start,
        "run_probe",
        lambda engine, *a, **k: real_probe(TransformersEngine(*engine.made_of), *a, **k),
    )

    def opened(options, target, dtype, _):
        engine = Dropping(options, target, dtype)
        engine.made_of = (options, target, dtype)
        return engine

    monkeypatch.setattr(extract_run, "open_engine", opened)
    common = {"data": data, "layers": TINY_LAYERS, "dtype": "float32"}
    with pytest.raises(EngineError, match="1 of 20 samples are bad"):
        paceline.extract(out=str(tmp_path / "strict"), **common)
    result = paceline.extract(out=str(tmp_path / "lax"), max_quarantined_share=0.1, **common)
    assert result["accounting"]["done"] == 19
    assert result["accounting"]["quarantined"] == {"states of layer k = 1 are not finite": 1}
    assert len(Store(tmp_path / "lax")) == 19


def test_an_engine_that_turns_bad_stops_the_run_and_one_that_is_mended_goes_on(
    tmp_path, monkeypatch
):
    data = str(prepared(tmp_path, num_rows=30))
    out = tmp_path / "store"

    class TurnsBad(TransformersEngine):
        is_probed = False

        def capture(self, *args):
            if TurnsBad.is_probed:
                self._decoder.layers[3].register_forward_hook(lambda m, a, o: o / 0.0)
            super().capture(*args)
            TurnsBad.is_probed = True

    common = {"data": data, "out": str(out), "layers": TINY_LAYERS, "dtype": "float32"}
    common["max_batch_tokens"] = 64
    with monkeypatch.context() as patch:
        with_engine(patch, TurnsBad)
        patch.setattr(extract_quarantine, "_LOOK_S", 0.0)
        with pytest.raises(EngineError, match=r"of 30 samples are bad.*first: r\d+: states of"):
            paceline.extract(**common)
    # Bad from the first batch on, and the limit is below one sample of 30: that batch was the last.
    lines = (out / "quarantine-0.jsonl").read_text().splitlines()
    assert 0 < len(lines) <= 64 // 4
    result = paceline.extract(**common)
    assert result["accounting"] == {"in": 30, "done": 30, "quarantined": {}, "skipped": {}}
    assert not list(out.glob("quarantine-*"))
    model = load_model(Target(TargetReference(str(tmp_path / "target"))), torch.float32, "cpu")
    assert all(float(e.max()) < 5e-4 for e in worst_errors(Store(out), model, 8).values())


def rejecting(bad: dict[str, str], worker: int) -> type:
    """An engine in which this worker rejects these samples, with reasons."""

    class Rejecting(TransformersEngine):
        def capture(self, samples, plan, destination, on_tokens):
            samples = list(samples)
            good = [s for s in samples if s.sample_id not in bad]
            super().capture(good, plan, destination, on_tokens)
            with destination.open(worker) as sink:
                for sample in destination.missing(samples):
                    if sample.sample_id in bad:
                        sink.reject(sample, bad[sample.sample_id])

    return Rejecting


def test_what_was_bad_runs_again_and_the_last_run_s_word_counts(tmp_path, monkeypatch):
    data = str(prepared(tmp_path, num_rows=20))
    common = {"data": data, "out": str(tmp_path / "store"), "layers": TINY_LAYERS}
    with_engine(monkeypatch, rejecting({"r3": "old", "r4": "old", "r5": "old"}, worker=1))
    with pytest.raises(EngineError, match="3 of 20 samples are bad"):
        paceline.extract(**common, max_quarantined_share=0.1)
    assert len(published_ids(tmp_path / "store")) == 17
    # A worker whose file stands before the other's.
    with_engine(monkeypatch, rejecting({"r4": "new"}, worker=0))
    result = paceline.extract(**common, max_quarantined_share=0.1)
    assert result["accounting"] == {"in": 20, "done": 19, "quarantined": {"new": 1}, "skipped": {}}
    assert list(result["side_files"]) == ["quarantine-0.jsonl", "start.json"]
    ids = Store(tmp_path / "store").records.sample_ids()
    assert sorted(ids) == sorted({f"r{i}" for i in range(20)} - {"r4"})


def test_batches_stay_in_the_budget_and_lose_nothing():
    generator = np.random.default_rng(0)
    samples = []
    for i, size in enumerate(generator.integers(2, 300, 500)):
        mask = np.zeros(size, bool)
        mask[-1] = True
        samples.append(TokenSample(str(i), np.zeros(size, np.int32), mask))
    batches = list(length_buckets(samples, 512))
    assert sorted(int(s.sample_id) for b in batches for s in b) == list(range(500))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(s.num_tokens for s in batch) <= 512
    real = sum(s.num_tokens for s in samples)
    padded = sum(len(b) * max(s.num_tokens for s in b) for b in batches)
    assert padded <= 1.05 * real


def test_a_damaged_shard_is_made_again_as_its_error_says(tmp_path):
    store = extracted(tmp_path, shard_bytes=100_000)
    before = Store(store).manifest
    path = store / "shards/00001.safetensors"
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorruption, match="Remove this file and run the command"):
        paceline.inspect(str(store), verify=True)
    path.unlink()
    with pytest.raises(StoreCorruption, match="shards are missing"):
        Store(store)
    extracted(tmp_path, shard_bytes=100_000)
    paceline.inspect(str(store), verify=True)
    # The same batches ran, so that the states are the same to the bit.
    after = Store(store).manifest
    assert after.fingerprint == before.fingerprint
    assert after.result["accounting"] == before.result["accounting"]


def stopping(num_captures: int) -> type:
    """An engine whose run is stopped after so many captures: the probe's, held-out, training."""

    class Stopping(TransformersEngine):
        left = num_captures

        def capture(self, *args):
            if Stopping.left == 0:
                raise KeyboardInterrupt
            Stopping.left -= 1
            super().capture(*args)

    return Stopping


def test_a_run_that_goes_on_with_another_engine_probes_it_first(tmp_path, monkeypatch):
    data = str(prepared(tmp_path, num_rows=20))
    out = tmp_path / "store"
    common = {"data": data, "out": str(out), "layers": TINY_LAYERS, "dtype": "float32"}
    with monkeypatch.context() as patch:
        with_engine(patch, stopping(2))
        with pytest.raises(KeyboardInterrupt):
            paceline.extract(**common)
    before = published_ids(out)
    assert 0 < len(before) < 20
    # The constructor's arguments make it another target; it stays true to itself.
    with monkeypatch.context() as patch:
        with_engine(patch, type("Wrong", (_Wrong,), {"fault": "other rope theta"}))
        says = r"layer k = 1 differs .*engine_options.hf_overrides: was None, now {'rope_theta'"
        with pytest.raises(ProbeFailure, match=says):
            paceline.extract(**common, engine_options={"hf_overrides": {"rope_theta": 1}})
    assert published_ids(out) == before
    # One that is right is let go on, and is written down with what its own probe saw.
    result = paceline.extract(**common, engine_options={"seed": 1})
    assert result["accounting"]["done"] == 20
    [later] = result["later_engines"]
    assert later["engine_options"] == {"seed": 1}
    assert later["probe"]["errors"].keys() == result["probe"]["errors"].keys()
    model = load_model(Target(TargetReference(str(tmp_path / "target"))), torch.float32, "cpu")
    assert all(float(e.max()) < 5e-4 for e in worst_errors(Store(out), model, 8).values())


def test_an_interrupted_run_goes_on_in_the_dtype_it_began_in(tmp_path, monkeypatch):
    data = str(prepared(tmp_path, num_rows=20))
    out = tmp_path / "store"
    common = {"data": data, "out": str(out), "layers": TINY_LAYERS}
    with monkeypatch.context() as patch:
        with_engine(patch, stopping(1))
        patch.setattr(extract_run, "choose_dtype", lambda *_: torch.bfloat16)
        with pytest.raises(KeyboardInterrupt):
            paceline.extract(**common)
    assert json.loads((out / "start.json").read_text())["dtype"] == "bfloat16"
    with monkeypatch.context() as patch:
        patch.setattr(extract_run, "choose_dtype", lambda *_: torch.float32)
        assert paceline.extract(**common)["dtype"] == "bfloat16"
    assert Store(out).spec.dtype == "bfloat16"
