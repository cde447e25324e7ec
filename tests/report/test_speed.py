"""Speed on the page: measured ratios as they are, predictions with their best K."""

from paceline.report.speed import speed

SPEED = {
    "5": {"1": {"tokens_per_s": 30.0, "plain_tokens_per_s": 20.0, "ratio": 1.5}},
    "3": {
        "1": {"tokens_per_s": 26.0, "plain_tokens_per_s": 20.0, "ratio": 1.3},
    },
}
SPEEDUP = {
    "engine": "transformers",
    "device": "cuda",
    "acceptance_lengths": {"1": 1.5, "2": 1.8},
    "table": [
        {"batch_size": 1, "context": 512, "predicted": {"1": 1.25, "2": 1.3}, "best": 2},
        {"batch_size": 64, "context": 2048, "predicted": {"1": 0.9, "2": 0.8}, "best": 0},
    ],
    "left_out": [(64, 4096)],
}


def test_nothing_timed_is_no_section():
    assert speed(None) is None
    assert speed({"results": {}}) is None


def test_measured_and_predicted_stand_beside_each_other():
    found = speed({"speed": SPEED, "speedup": SPEEDUP})
    assert found["measured"].columns == ["requests at a time", "tokens/s alone", "K = 3", "K = 5"]
    assert found["measured"].rows == [
        ["1", "20.0", ("1.30 x", "26.0 tokens/s"), ("1.50 x", "30.0 tokens/s")]
    ]
    assert found["predicted"].rows == [
        ["1", "512", "1.25 x", "1.30 x", "2"],
        ["64", "2,048", "0.90 x", "0.80 x", "none"],
    ]
    assert "this run's cuda" in found["about"]
    assert "want of memory: 64 at 4,096 tokens" in found["about"]


def test_a_server_without_a_plain_one_has_rates_alone():
    alone = {"3": {"8": {"tokens_per_s": 90.0, "plain_tokens_per_s": None, "ratio": None}}}
    assert speed({"speed": alone})["measured"].rows == [["8", "n/a", ("n/a", "90.0 tokens/s")]]
