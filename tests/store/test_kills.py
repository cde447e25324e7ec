"""kill -9 at any instant: nothing published is lost, nothing half is published, the same command
goes on to a store equal to an undisturbed one. Kills come at random, and at each call to the file
system."""

import itertools
import os
import random
import signal
from pathlib import Path

import pytest
import torch

from paceline.errors import LockedError
from paceline.store import ShardWriter, Store, published_ids

from .children import in_child, wait, with_fuse
from .making import assert_holds, states_of, write_manifest
from .rounds import IS_TORTURE, ROUNDS
from .working import SAMPLES, SPEC, assert_equal_to_undisturbed, published_now, run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("undisturbed") / "store"
    run(folder)
    return folder


def test_random_kills(tmp_path: Path, undisturbed: Path) -> None:
    rng = random.Random(0)
    kills = rounds = 0
    while kills < ROUNDS:
        folder = tmp_path / f"round-{rounds}"
        rounds += 1
        while not _finished(folder):
            before = published_now(folder)
            # Now and then one is let through, so that finished folders are met too.
            kill_at = rng.randint(0, len(SAMPLES) + 4)
            status = _run_and_kill(folder, kill_at, rng, num_lanes=1 + rounds % 2)
            kills += status == -signal.SIGKILL
            assert status in (0, -signal.SIGKILL)
            after = published_now(folder)
            assert before.items() <= after.items()
        assert_equal_to_undisturbed(folder, undisturbed)
        stamps = _stamps(folder)
        run(folder)
        assert _stamps(folder) == stamps
    print(f"{kills} random kills of {rounds} runs")


def _run_and_kill(folder: Path, kill_at: int, rng: random.Random, num_lanes: int) -> int:
    def work(writing: int) -> None:
        run(folder, on_sample=lambda count: os.write(writing, b"."), num_lanes=num_lanes)

    pid, reading = in_child(work)
    for _ in range(kill_at):
        if not os.read(reading, 1):
            break
    # Somewhere between this report and the next.
    for _ in range(rng.randint(0, 20_000)):
        pass
    os.kill(pid, signal.SIGKILL)
    return wait(pid, reading)


def _finished(folder: Path) -> bool:
    return (folder / "manifest.json").is_file() and '"complete"' in (
        folder / "manifest.json"
    ).read_text()


def _stamps(folder: Path) -> list[tuple[str, int]]:
    return sorted((p.name, p.stat().st_mtime_ns) for p in (folder / "shards").iterdir())


def test_a_kill_at_each_call_to_the_file_system(tmp_path: Path, undisturbed: Path) -> None:
    """Before the n-th and after the n-th, for every n (outside torture: every ninth) of a run of a
    few samples. Each is killed again while it recovers."""
    samples = SAMPLES[:6]
    plain = tmp_path / "plain"
    run(plain, samples)
    num_calls = num_kills = 0
    for after in (False, True):
        for n in itertools.count(int(after), 1 if IS_TORTURE else 9):
            folder = tmp_path / f"{after}-{n}"
            fuse = with_fuse(lambda folder=folder: run(folder, samples), n, after)
            if wait(*in_child(fuse)) == 0:
                num_calls += n
                break
            num_kills += 1 + (wait(*in_child(fuse)) != 0)
            run(folder, samples)
            assert_equal_to_undisturbed(folder, plain, samples)
    assert num_calls > 60
    print(f"{num_kills} kills before and after the calls of a run, {num_calls // 2} of them")


def test_sigterm_leaves_a_folder_that_goes_on(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "store"

    def work(writing: int) -> None:
        # As the command line does it: the signal becomes an exception.
        signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(143)))
        run(folder, on_sample=lambda count: os.write(writing, b"."))

    pid, reading = in_child(work)
    os.read(reading, 20)
    os.kill(pid, signal.SIGTERM)
    assert wait(pid, reading) in (0, 1)
    run(folder)
    assert_equal_to_undisturbed(folder, undisturbed)


def test_the_second_run_on_one_store_is_refused_while_the_first_lives(
    tmp_path: Path, undisturbed: Path
) -> None:
    folder = tmp_path / "store"
    block_reading, block_writing = os.pipe()

    def work(writing: int) -> None:
        def on_sample(count: int) -> None:
            if count == 2:
                os.write(writing, b".")
                os.read(block_reading, 1)

        run(folder, on_sample=on_sample)

    pid, reading = in_child(work)
    try:
        os.read(reading, 1)
        (aside,) = (folder / "shards").iterdir()
        with pytest.raises(LockedError, match=f"in use by another run \\(pid {pid}\\)"):
            run(folder)
        # Looking at ids is no reason to touch what a living writer has in work.
        published_ids(folder)
        assert aside.exists()
    finally:
        os.write(block_writing, b".")
        status = wait(pid, reading)
        os.close(block_reading)
        os.close(block_writing)
    assert status == 0
    assert_equal_to_undisturbed(folder, undisturbed)


def test_workers_of_one_run_never_collide(tmp_path: Path) -> None:
    """Four processes, released together, publish many small shards into one folder."""
    gate_reading, gate_writing = os.pipe()
    children = []
    for worker in range(4):

        def work(writing: int, worker: int = worker) -> None:
            os.close(gate_writing)
            os.read(gate_reading, 1)
            with ShardWriter(tmp_path, SPEC, worker=worker) as writer:
                for sample in SAMPLES[worker::4]:
                    writer.add(sample, *states_of(sample, SPEC))
                    writer.close()

        children.append(in_child(work))
    os.close(gate_reading)
    os.close(gate_writing)
    assert [wait(*child) for child in children] == [0] * 4
    write_manifest(tmp_path)
    store = Store(tmp_path, unfinished=True)
    assert len(store.records.shard_numbers) == len(SAMPLES)
    assert_holds(store, SAMPLES)
