"""Two ranks on two GPUs through NCCL: the numbers of one, and an end when one of them fails."""

import pytest
import torch
from safetensors.torch import load_file

from paceline.train.ranks import Ranks
from tests.lines import extracted, trained
from tests.train import rank_work
from tests.train.launch import run_ranks
from tests.train.test_ranks import WAYS, assert_close, curve

pytestmark = pytest.mark.multi_gpu


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("line")
    extracted(folder)
    return folder


def test_gradients_of_two_gpus_are_those_of_one(tmp_path):
    codes, texts = run_ranks(rank_work.steps, tmp_path / "ranks", str(tmp_path), "cuda")
    assert codes == [0, 0], texts
    alone = Ranks(torch.device("cuda"))
    one = rank_work.one_step(alone, "ddp", [list(range(len(rank_work.MASKS)))])
    for how in WAYS:
        for name in rank_work.SHARES:
            given = [load_file(tmp_path / f"{how} {name} {rank}") for rank in (0, 1)]
            assert all(torch.equal(given[0][key], given[1][key]) for key in given[0])
            assert_close(given[0], one, 1e-3)


@pytest.mark.parametrize("how", WAYS)
def test_a_run_on_two_gpus_is_that_of_one(line, tmp_path, how):
    options = {"parallel": how, "micro_batch_tokens": 40, "device": "cuda"}
    trained(line, str(tmp_path / "one"), **options)
    two = tmp_path / "two"
    codes, texts = run_ranks(rank_work.train, tmp_path / "ranks", str(line), str(two), {}, options)
    assert codes == [0, 0], texts
    for one, other in zip(curve(tmp_path / "one"), curve(two), strict=True):
        assert other == pytest.approx(one, rel=2e-2)


@pytest.mark.parametrize("how", WAYS)
def test_a_killed_rank_ends_all_and_the_run_goes_on(line, tmp_path, how):
    options = {"parallel": how, "device": "cuda"}
    run = lambda faults: run_ranks(
        rank_work.train,
        tmp_path / "ranks",
        str(line),
        str(tmp_path / "run"),
        faults,
        options,
    )
    codes, texts = run({"die_at": 5})
    assert codes == [1, -9]
    assert texts[0] in ("", "RankError: rank 1 ended without a word (killed? out of memory?)")
    codes, texts = run({})
    assert codes == [0, 0], texts
    assert len(curve(tmp_path / "run")) == 8


def test_T08_a_rank_that_fails_in_save_ends_all_with_its_text(line, tmp_path):
    options = {"parallel": "fsdp2", "device": "cuda"}
    arguments = str(line), str(tmp_path / "run"), {"fail_in_save": 1}, options
    codes, texts = run_ranks(rank_work.train, tmp_path / "ranks", *arguments)
    assert codes == [1, 1]
    assert "the disk fell off" in texts[0]
