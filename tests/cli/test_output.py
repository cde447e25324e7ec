"""The program's two streams and its exit codes, as a shell sees them."""

import json
import subprocess
import sys

import pytest

from paceline import __version__
from paceline.cli import evaluate, extract
from paceline.cli.acceptance import show_acceptance
from paceline.cli.inspect import show_sample
from paceline.cli.output import sparkline
from tests.cli.consoles import text_console
from tests.tiny_line import program, start


def _json(done):
    """The one object on stdout: nothing before, nothing after but the line's end."""
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


def test_json_owns_stdout_and_people_have_stderr(tiny_run):
    done = program("run", tiny_run.parent / "recipe.yaml", "--json")
    assert done.returncode == 0, done.stderr
    result = _json(done)
    assert set(result) == {"run_dir", "stages", "page"}
    assert all(stage["skipped"] for stage in result["stages"].values())
    assert "INFO train     finished before" in done.stderr
    assert "{" not in done.stderr.replace('\'{"method"', "")


def test_json_of_work_that_loads_a_model(tiny_run, tmp_path):
    """Loading bars, warnings and prints of libraries must not get between."""
    out = tmp_path / "prepared"
    done = program(
        *("prepare", "--json", "--target", tiny_run.parent / "target", "--out", out),
        *("--data", tiny_run / "generate", "--heldout-share", "0.5"),
    )
    assert done.returncode == 0, done.stderr
    assert _json(done)["conversations"] == 32
    assert "%|" not in done.stderr  # no bar of another library where no terminal is


def test_people_get_tables_and_the_page(tiny_run):
    done = program("run", tiny_run.parent / "recipe.yaml")
    assert done.returncode == 0, done.stderr
    for words in ("bigram table", "prompt lookup", "acceptance length = 1 + accepted", "K = 3"):
        assert words in done.stdout
    assert f"page: {tiny_run / 'report' / 'index.html'}" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_seen_enough_is_no_failure(tiny_run):
    """`paceline inspect ... | head -1`: exit code 0 and no complaint."""
    process = start("inspect", tiny_run / "train")
    process.stdout.close()
    _, told = process.communicate(timeout=300)
    assert (process.returncode, told) == (0, "")


def test_version_and_help_need_no_command():
    assert program("--version").stdout == f"paceline {__version__}\n"
    done = program()
    assert done.returncode == 2
    assert "Commands:" in done.stderr


@pytest.mark.parametrize("arguments", [["trian"], ["train", "--epoch", "3"], ["inspect", "a", "b"]])
def test_wrong_usage_is_code_2_with_or_without_json(arguments):
    done = program(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error: " in done.stderr
    done = program(*arguments, "--json")
    assert done.returncode == 2
    error = _json(done)["error"]
    assert (error["kind"], error["exit_code"]) == ("UsageError", 2)
    assert error["message"]


def test_wrong_values_of_options_are_all_told_without_loading_torch():
    done = program("train", "--ttt-steps", "0", "--schedule", "cubic", "--betas", "1", "--json")
    assert done.returncode == 2
    message = _json(done)["error"]["message"]
    for name in ("ttt_steps", "schedule", "betas"):
        assert f"  {name}" in message


def test_brackets_in_the_data_s_own_names_are_printed_as_they_are(tiny_run, tmp_path):
    names = ("chats[en]", "lmsys[/zh]", "a :warning: [bold]x")
    rows = [
        {"input_ids": [5, number, 7], "loss_mask": [0, 0, 1], "source": name}
        for number, name in enumerate(names, start=10)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = program(
        *("prepare", "--target", tiny_run.parent / "target", "--data", data),
        *("--out", tmp_path / "prepared[/1]"),
    )
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"source {name} " in done.stdout
    done = program("inspect", tmp_path / "prepared[/1]")
    assert done.returncode == 0, done.stderr
    assert "prepared[/1]" in done.stdout


_BROKEN_WORK = "def fail(self, values): raise ZeroDivisionError('on purpose')\nCommand.run = fail\n"
_BROKEN_SHOW = (
    "def fail(result, console): raise ZeroDivisionError('on purpose')\n"
    "Command.run = lambda self, values: {}\n"
    "program.COMMANDS = [replace(c, show=fail) for c in program.COMMANDS]\n"
)


@pytest.mark.parametrize("broken", [_BROKEN_WORK, _BROKEN_SHOW], ids=["work", "show"])
def test_an_unexpected_error_is_short_and_debug_shows_where(broken):
    code = (
        "from dataclasses import replace\n"
        "import paceline.cli.main as program\n"
        "from paceline.cli.command import Command\n"
        f"{broken}program.main()\n"
    )
    plain, debug = (
        subprocess.run(
            [sys.executable, "-c", code, "inspect", "x", *flags],
            capture_output=True,
            text=True,
            check=False,
        )
        for flags in ([], ["--debug"])
    )
    assert plain.returncode == debug.returncode == 1
    assert "unexpected ZeroDivisionError: on purpose (--debug shows where)" in plain.stderr
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr


def test_the_program_may_open_as_many_files_as_the_machine_lets_it():
    code = (
        "import resource\n"
        "import paceline.cli.main as program\n"
        "from paceline.cli.command import Command\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "limits = lambda: list(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "Command.run = lambda self, values: {'limits': limits()}\n"
        "program.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", "x", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert _json(done) == {"limits": [300, 300]}


def test_samples_that_are_not_in_the_store_are_no_full_success():
    accounting = {"in": 10, "done": 7, "quarantined": {"zero row": 2}, "skipped": {"too long": 1}}
    assert extract.problems({"accounting": accounting}) == [
        "extract: 3 of 10 samples are not in the store: quarantined zero row 2; skipped too long 1"
    ]
    assert extract.problems({"accounting": {**accounting, "done": 10}}) == []


@pytest.mark.parametrize(
    ("dtype", "equal", "near_ties", "problems"),
    [
        ("float32", 8, 1, 1),
        ("float32", 9, 1, 0),
        ("float32", 10, 0, 0),
        ("bfloat16", 9, 0, 0),
    ],
)
def test_decoding_that_is_not_lossless_fails_in_float32(dtype, equal, near_ties, problems):
    """But where two tokens are as likely as rounding can tell."""
    lossless = {"equal_outputs": equal, "near_ties": near_ties, "outputs": 10}
    result = {"dtype": dtype, "lossless": lossless}
    assert len(evaluate.problems(result)) == problems


def _measured(**more):
    pooled = {
        "acceptance_length": 2.0,
        "interval": [1.5, 2.5],
        "per_position": [0.7, 0.3],
        "left_out": 4,
        "conversations": 3,
    }
    nothing = {**pooled, "acceptance_length": None, "interval": None, "per_position": [0.0, 0.0]}
    return {
        "definition": "the definition",
        "mode": "decode",
        "dtype": "float32",
        "results": {"2": {"pooled": pooled, "sources": {"only": pooled}}},
        "baselines": {"bigram": {"2": {"pooled": nothing, "sources": {}}}},
        **more,
    }


def test_A04_the_quotients_stand_under_their_own_names():
    quotients = {
        "completion_tokens_per_verify_step": 2.525,
        "tokens_per_verify_step": 2.5,
        "mean_of_request_ratios": 1.75,
    }
    console, text = text_console()
    show_acceptance(_measured(quotients={"2": quotients}), console)
    shown = text()
    assert "K = 2: completion tokens / verify steps, as servers report it: 2.525" in shown
    assert "tokens per verify step, the prefill token taken off (pooled): 2.500" in shown
    assert "mean over requests of their own ratios: 1.750" in shown


def test_acceptance_is_shown_with_interval_definition_and_what_was_left_out():
    console, text = text_console()
    difference = {"conversation": "c7", "turn": 0, "num_draft_tokens": 2, "position": 5}
    difference |= {"own": 11, "other": 12, "gap": 0.00025}
    lossless = {"equal_outputs": 3, "outputs": 4, "near_ties": 1, "differences": [difference]}
    speed = {"2": {"1": {"tokens_per_s": 30.0, "plain_tokens_per_s": 20.0, "ratio": 1.5}}}
    timed = {"batch_size": 4, "context": 2048, "predicted": {"1": 1.24, "2": 0.97}, "best": 1}
    speedup = {
        "engine": "transformers",
        "device": "cpu",
        "acceptance_lengths": {"1": 1.5, "2": 2.0},
        "table": [timed],
        "left_out": [(64, 2048)],
    }
    show_acceptance(_measured(lossless=lossless, speed=speed, speedup=speedup), console)
    shown = text()
    assert "2.000 [1.50, 2.50]" in shown
    assert "n/a" in shown  # the baseline made no verify step
    assert "the definition" in shown
    assert "4 at K = 2" in shown
    assert "3 of 4; of the others 1 differ at a near tie" in shown
    assert "c7, turn 1, K = 2: token 5 is 12 and not 11, log p gap 0.00025" in shown
    assert "1.50" in shown
    assert "4 at a time" in shown and "1.24" in shown and "0.97" in shown
    assert "64 at a time with 2,048 tokens do not fit into memory" in shown


def test_supervised_tokens_are_marked_where_there_are_no_colours():
    sample = {
        "sample_id": "s[1]",
        "source": "",
        "split": None,
        "note": "not [decoded]",
        "pieces": [
            {"text": "ask", "kind": "context"},
            {"text": "tell [b]", "kind": "supervised"},
            {"text": "more", "kind": "past_end"},
        ],
    }
    console, text = text_console()
    show_sample(sample, console)
    assert "ask{+tell [b]+}{~more~}" in text()
    assert "not [decoded]" in text()
    console, text = text_console(terminal=True)
    show_sample(sample, console)
    assert "\x1b[1;32mtell [b]\x1b[0m" in text()


def test_sparklines_go_from_lowest_to_highest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([0.0] * 50 + [1.0] * 50, width=2) == "▁█"
