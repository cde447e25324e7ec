"""Two sources that number their conversations alike: nobody takes them for the same ones."""

import json
from collections import Counter

import paceline
from paceline.dataset import TokenDataset

from .lines import TINY_LAYERS, trained, write_rows
from .targets import save_target


def test_conversations_are_counted_and_told_by_source(tmp_path):
    save_target(tmp_path / "target")
    files = []
    for seed, name in enumerate(("a", "b")):
        file = write_rows(tmp_path / f"{name}.jsonl", 12, seed)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        # Two rows a conversation, the last four held out.
        for i, row in enumerate(rows):
            row |= {"conversation_id": i // 2, "split": "heldout" if i >= 8 else "train"}
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(str(file))
    data = str(tmp_path / "prepare")
    prepare = {"target": str(tmp_path / "target"), "data": files, "out": data}
    assert paceline.prepare(**prepare)["conversations"] == 12
    store = str(tmp_path / "store")
    paceline.extract(data=data, out=store, layers=TINY_LAYERS, dtype="float32")
    paceline.align(data=data, out=str(tmp_path / "vocab"), draft_vocab_size=64)
    done = trained(tmp_path, eval_draft_tokens=1, eval_samples=None)
    found = paceline.evaluate(
        draft=str(tmp_path / "draft"),
        store=store,
        out=str(tmp_path / "evaluate"),
        dtype="float32",
        num_draft_tokens=[1],
    )
    # With K = 1 every step that is counted or left out stands in exactly one answer, and no
    # answer has fewer than its length over two of them.
    sizes = Counter()
    for sample in TokenDataset(data).split("heldout"):
        sizes[sample.source] += sample.num_supervised
    for method in (found["results"], found["baselines"]["bigram"]):
        table = method["1"]
        assert table["pooled"]["conversations"] == 4
        for name, size in sizes.items():
            part = table["sources"][name]
            assert part["conversations"] == 2
            steps = part["verify_steps"] + part["left_out"]
            assert steps + part["accepted"] <= size <= 2 * steps + 4
    assert done["heldout"]["acceptance"]["conversations"] == 4
