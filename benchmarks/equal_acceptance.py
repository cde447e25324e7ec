"""Equal data, equal optimiser steps: acceptance length of drafts trained by paceline beside one
trained by speculators 0.9.0's EAGLE-3 model, on the same features of SmolLM2-135M.

    python benchmarks/equal_acceptance.py --data FOLDER --scratch FOLDER --out FOLDER

needs the peer's wheels on the path (as benchmarks/train_cpu.py installs them). FOLDER of `--data`:
see sweep.py, whose features are used where they are there. In one process, step by step, the same
samples in the same order go to several drafts of one shape (one layer, an RMSNorm on each auxiliary
state, one draft vocabulary) with one optimiser (our recipe's at its rate: Muon, which the peer's
own trainer takes too; `--set train.optimiser=adamw train.learning_rate=2e-3` for another), on
float32 weights, clipped, one schedule:

    speculators    its own starting values, head frozen (it trains none)
    same_start     paceline from those very values, head frozen
    INIT-T         paceline from its own start, `draft.init` INIT, taught at temperature T, head
                   frozen; `--drafts`, else both starts at our recipe's temperature

Loss: KL on the draft vocabulary, TTT step j weighted 0.8^j. Two differences in what is averaged are
left as they are: speculators divides step j by its own rows, and at later steps it also teaches
rows in front of an answer. All are measured by the same server-free evaluation in float32.
Differences are paceline's minus speculators', with a 95% interval of a paired bootstrap over
conversations; `lower_bound` is that of the first INIT-T at K = 5 on all answers, both seeds
together.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from equal_trainers import OwnTrainer, PeerTrainer, Setup, same_start
from sweep import CHAINS, OWN_KIND, common_parser, features, gpus_of, machine_of, plan, say

import paceline
from paceline.device import choose_device, training_dtype
from paceline.draft.from_target import draft_config
from paceline.recipe import DraftOptions, TrainOptions, build
from paceline.store import PackedReader, Store
from paceline.store.packing import iterate_packed
from paceline.target.spec import Target, TargetReference
from paceline.train.balance import RankShare
from paceline.train.run import AUX_RMS_SAMPLES, aux_rms
from paceline.train.schedule import learning_rate
from paceline.train.source import plan_of
from paceline.train.start import new_draft
from paceline.vocab import load_vocabulary

HERE = Path(__file__).parent
GROUPS = ("all", "six", "heldout")


def main() -> None:
    options = parse()
    started = time.monotonic()
    given = {"align.draft_vocab_size": options.draft_vocab, "prepare.limit": options.rows}
    setting = plan(options, "equal", {k: v for k, v in given.items() if v})
    gpus = gpus_of(int(torch.cuda.is_available()))
    features(machine_of(options, started + options.seconds), [setting], gpus)
    say(f"features ready after {time.monotonic() - started:.0f} s")
    store = Store(setting.stages["extract"]["out"])
    setup = make_setup(options, setting.stages, store)
    at = setup.options.teacher_temperature
    options.drafts = options.drafts or [f"random-{at}", f"target-{at}"]
    peer = PeerTrainer(setup)
    counts: dict[str, list[dict]] = {}
    for seed in options.seeds:
        for name, draft in train_all(options, setup, store, peer, seed).items():
            out = draft.with_name(f"{draft.name}-measured")
            paceline.evaluate(
                draft=str(draft),
                target=setup.target.reference.target,
                store=setting.answers["extract"]["out"],
                out=str(out),
                num_draft_tokens=CHAINS,
                baselines=False,
                bootstrap=100,
                dtype="float32",
                overwrite=True,
            )
            counts.setdefault(name, []).append(read_counts(out / "conversations.jsonl"))
    result = {"data": described(store), "settings": setup.options.model_dump(mode="json")}
    result |= compare(counts, options.seeds, options.drafts[0])
    result["seconds"] = round(time.monotonic() - started, 1)
    (options.out / "equal.json").write_text(json.dumps(result))
    show(result)
    print(json.dumps({key: result[key] for key in ("lower_bound", "data", "seconds")}))


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.add_argument("--rows", type=int, default=10_500, help="0: all")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens in a step")
    parser.add_argument("--ttt", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--drafts", nargs="+", metavar="INIT-T")
    parser.add_argument("--seconds", type=float, default=380.0, help="for the features")
    return parser.parse_args()


def make_setup(options: argparse.Namespace, stages: dict[str, Any], store: Store) -> Setup:
    target = Target(TargetReference(**store.manifest.result["target"]))
    vocabulary = load_vocabulary(stages["align"]["out"])
    device = choose_device("auto")
    recipe = {n: stages["train"][n] for n in ("optimiser", "learning_rate", "teacher_temperature")}
    train = build(
        TrainOptions,
        {
            **recipe,
            "ttt_steps": options.ttt,
            "logit_chunk": options.tokens,
            "micro_batch_tokens": options.tokens,
        },
    )
    return Setup(
        target=target,
        config=draft_config(
            DraftOptions(),
            target.text_config,
            store.spec.layers.aux,
            len(vocabulary.d2t),
        ),
        vocabulary=vocabulary,
        options=train,
        device=device,
        dtype=torch.float32 if device.type == "cpu" else training_dtype("auto", device),
        max_tokens=options.tokens,
    )


def train_all(
    options: argparse.Namespace, setup: Setup, store: Store, peer: PeerTrainer, seed: int
) -> dict[str, Path]:
    """Train the drafts side by side. Returns their folders."""
    folder = options.scratch / f"equal-{seed}"
    peer.restart(seed)
    start = same_start(setup, peer, folder / "start")
    trainers = [peer, OwnTrainer("same_start", setup, start)]
    order = plan_of(TrainOptions(seed=seed), store, RankShare())
    scale = aux_rms(store, order.first_samples(AUX_RMS_SAMPLES))
    for name in options.drafts:
        init, temperature = name.split("-")
        given = setup.config, setup.vocabulary, setup.target, scale, seed
        own = new_draft(*given, from_target=init == "target")
        trainers.append(OwnTrainer(name, setup, own, float(temperature)))
    groups = [
        group
        for epoch in range(options.epochs)
        for group in iterate_packed(store, "train", options.tokens, seed=seed, epoch=epoch)
    ]
    train = setup.options
    began, losses = time.monotonic(), {}
    for number, packed in enumerate(PackedReader(store, groups, device=setup.device)):
        rate = learning_rate(
            number,
            len(groups),
            train.learning_rate,
            train.warmup_steps,
            train.schedule,
            train.min_lr_ratio,
        )
        losses = {t.name: t.step(packed, rate) for t in trainers}
        if number % 100 == 0 or number + 1 == len(groups):
            told = ", ".join(f"{name} {float(loss):.3f}" for name, loss in losses.items())
            say(
                f"seed {seed}, step {number + 1} of {len(groups)}, "
                f"{time.monotonic() - began:.0f} s: loss {told}"
            )
    folders = {trainer.name: folder / trainer.name for trainer in trainers}
    for trainer in trainers:
        trainer.save(folders[trainer.name])
    return folders


def described(store: Store) -> dict[str, int]:
    chosen = store.split("train")
    return {
        "samples": len(chosen),
        "tokens": int(store.records.num_tokens[chosen].sum()),
        "supervised_tokens": int(store.records.num_supervised[chosen].sum()),
    }


def read_counts(path: Path) -> dict[tuple[str, str, int], tuple[int, int]]:
    """(source, conversation, K) -> (verify steps, accepted)."""
    rows = map(json.loads, path.read_text().splitlines())
    return {
        (r["source"], r["conversation"], r["num_draft_tokens"]): (r["verify_steps"], r["accepted"])
        for r in rows
    }


def compare(counts: dict[str, list[dict]], seeds: list[int], judged: str) -> dict[str, Any]:
    """Lengths of all drafts and differences to the peer's, by answers, K and seed."""
    result: dict[str, Any] = {"lengths": {}, "differences": {}}
    for group in GROUPS:
        for k in CHAINS:
            sums = {
                name: [sums_of(found, group, k) for found in runs] for name, runs in counts.items()
            }
            for name, runs in sums.items():
                key = f"{name}, {group}, K = {k}"
                result["lengths"][key] = [length(run.sum(0)) for run in runs]
                if name != PeerTrainer.name:
                    pairs = list(zip(runs, sums[PeerTrainer.name], strict=True))
                    both = tuple(sum(side) for side in zip(*pairs, strict=True))
                    named = dict(zip(map(str, seeds), pairs, strict=True)) | {"pooled": both}
                    found = {seed: difference(*pair) for seed, pair in named.items()}
                    result["differences"][key] = found
    bar = result["differences"][f"{judged}, all, K = 5"]["pooled"]
    return result | {"lower_bound": bar["interval"][0]}


def sums_of(found: dict, group: str, k: int) -> np.ndarray:
    """[conversations, 2]: verify steps and accepted tokens."""
    wanted = {"all": lambda s: True, "six": lambda s: s != OWN_KIND, "heldout": OWN_KIND.__eq__}
    chosen = wanted[group]
    return np.array([v for (source, _, n), v in sorted(found.items()) if n == k and chosen(source)])


def length(sums: np.ndarray) -> np.ndarray:
    """1 + accepted / verify steps of [..., 2]."""
    return 1 + sums[..., 1] / sums[..., 0]


def difference(ours: np.ndarray, theirs: np.ndarray, resamples: int = 2000) -> dict[str, Any]:
    """Of the acceptance lengths, with a 95% interval: the same conversations are drawn for both."""
    random = np.random.default_rng(0)
    drawn = random.integers(0, len(ours), (resamples, len(ours)))
    weights = np.stack([np.bincount(row, minlength=len(ours)) for row in drawn])
    gaps = length(weights @ ours) - length(weights @ theirs)
    return {
        "difference": float(length(ours.sum(0)) - length(theirs.sum(0))),
        "interval": np.percentile(gaps, [2.5, 97.5]).tolist(),
    }


def show(result: dict[str, Any]) -> None:
    for key, lengths in result["lengths"].items():
        line = f"{key:34s} " + " / ".join(f"{value:.3f}" for value in lengths)
        for seed, found in result["differences"].get(key, {}).items():
            low, high = found["interval"]
            line += f"  {seed}: {found['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
        say(line)


if __name__ == "__main__":
    main()
