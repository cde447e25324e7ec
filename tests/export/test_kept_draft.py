"""The draft that the repository keeps: small, good, and a place to start from."""

from pathlib import Path

import paceline

from ..conftest import RealRun

KEPT = Path(__file__).parents[2] / "drafts" / "smollm2-135m"
MOST_BYTES = 12_000_000


def test_the_kept_draft_guesses_well_and_trains_further(real_run: RealRun, tmp_path):
    """On new answers of twelve tokens; over whole answers it makes 2.4 at K = 3."""
    assert sum(file.stat().st_size for file in KEPT.iterdir()) <= MOST_BYTES
    common = {"store": str(real_run.store), "split": "train", "num_draft_tokens": [3]}
    measured = paceline.evaluate(draft=str(KEPT), out=str(tmp_path / "kept"), **common)
    length = measured["results"]["3"]["pooled"]["acceptance_length"]
    lookup = measured["baselines"]["prompt_lookup"]["3"]["pooled"]["acceptance_length"]
    assert length > max(1.7, lookup)
    further = paceline.train(
        store=str(real_run.store),
        start_from=str(KEPT),
        out=str(tmp_path / "further"),
        train_head=False,
        dtype="float32",
        max_steps=4,
        batch_rows=128,
        learning_rate=1e-4,
        warmup_steps=0,
    )
    assert further["steps"] == 4
    after = paceline.evaluate(
        draft=str(tmp_path / "further"), out=str(tmp_path / "after"), **common
    )
    assert after["results"]["3"]["pooled"]["acceptance_length"] > length - 0.1
