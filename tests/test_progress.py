"""Progress: quiet log lines without a terminal, bars on one; never a byte on stdout."""

import logging
import os
import pty
import subprocess
import sys

import pytest

from paceline import progress
from paceline.progress import Bar, progress_bar

_WORK = (
    "from paceline.progress import progress_bar\n"
    "with progress_bar('carrying', 4, 'stone') as bar:\n"
    "    for _ in range(4):\n"
    "        bar.advance(1, 'heavy')\n"
)


class _Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_line_tells_rate_and_time_left(clock):
    bar = Bar("extract", 1200, "tok")
    clock.now += 4.0
    bar.advance(400)
    assert bar.line("2 bad") == "extract: 400/1,200 tok, 100 tok/s, 8 s left 2 bad"


def test_unknown_totals_tell_no_time_left(clock):
    bar = Bar("read", None, "rows")
    clock.now += 2.0
    bar.advance(10)
    assert bar.line() == "read: 10 rows, 5 rows/s"


def test_log_lines_come_once_in_a_while(clock, caplog):
    bar = Bar("extract", 100, "tok")
    with caplog.at_level(logging.INFO, "paceline"):
        for _ in range(65):
            clock.now += 1.0
            bar.advance(1)
    assert len(caplog.records) == 2


def test_without_a_terminal_short_work_says_nothing(capfd):
    with progress_bar("carrying", 3, "stone") as bar:
        bar.advance(3)
    assert type(bar) is Bar
    assert capfd.readouterr() == ("", "")


def test_on_a_terminal_a_bar_is_drawn_on_stderr_alone():
    terminal, end = pty.openpty()
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORK],
        stdout=subprocess.PIPE,
        stderr=end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(end)
    drawn = b""
    while True:
        try:
            block = os.read(terminal, 4096)
        except OSError:  # Linux ends a terminal whose other side is gone with an error
            break
        if not block:
            break
        drawn += block
    os.close(terminal)
    out, _ = worker.communicate(timeout=300)
    assert worker.returncode == 0
    assert out == b""
    for word in (b"carrying", b"stone/s", b"100%", b"heavy"):
        assert word in drawn
