"""On the real target: the server-free figure is what real lossless decoding accepts, exactly."""

import paceline

from ..conftest import LONGEST_CHAIN, RealRun

LENGTHS = [3, LONGEST_CHAIN]


def test_server_free_acceptance_is_that_of_real_lossless_decoding(real_run: RealRun, tmp_path):
    common = {
        "draft": str(real_run.draft),
        "split": "train",
        "num_draft_tokens": LENGTHS,
        "dtype": "float32",
    }
    chain = paceline.evaluate(store=str(real_run.store), out=str(tmp_path / "chain"), **common)
    decode = paceline.evaluate(
        mode="decode",
        data=str(real_run.prepare),
        out=str(tmp_path / "decode"),
        max_new_tokens=12,
        **common,
    )
    lossless = decode["lossless"]
    assert lossless["equal_outputs"] == lossless["outputs"] == 24 * len(LENGTHS)
    for k in map(str, LENGTHS):
        seen, walked = decode["results"][k]["pooled"], chain["results"][k]["pooled"]
        assert walked["conversations"] == 24
        assert walked["left_out"] == 0
        for name in ("verify_steps", "accepted", "per_position", "acceptance_length"):
            assert walked[name] == seen[name], (k, name)
        # Trained on these very answers, so that accepted tokens are there to be compared.
        assert walked["acceptance_length"] > 1.3
        assert chain["results"][k]["sources"].keys() == {"s0", "s1"}
    assert chain["definition"] == decode["definition"]
