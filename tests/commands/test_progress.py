"""Progress goes to stderr, after a second, and nowhere else."""

import json
import logging
import os
import pty
import subprocess
import sys
import time

import pytest

from wavetrain.commands import progress as spoken
from wavetrain.commands.progress import progress
from wavetrain.planner.progress import LOG, Progress, to_log

HALF = Progress("degrees and options", 128, 9000, 4, 1.25)


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(spoken, "FIRST_S", 0.0)
    monkeypatch.setattr(spoken, "PLAIN_EVERY_S", 0.02)


def test_what_is_short_is_silent(capsys):
    with progress("best plan"):
        to_log(HALF)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.usefixtures("hasty")
def test_plain_lines_say_what_is_decided_and_count(capsys):
    with progress("best plan") as heard:
        to_log(HALF)
        time.sleep(0.1)
        heard.now("runner-ups")
        time.sleep(0.1)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    said = "progress: best plan: degrees and options 128 of 9,000, 4 simulated, best step 1.25 s; 0 s"
    assert said in lines
    assert lines[-1] == "progress: runner-ups; 0 s"
    assert all(line.startswith("progress: ") for line in lines)


def test_the_log_is_as_it_was():
    before = (LOG.level, list(LOG.handlers))
    with progress("nothing"):
        assert LOG.isEnabledFor(logging.DEBUG)
    with pytest.raises(KeyboardInterrupt), progress("nothing"):
        raise KeyboardInterrupt
    assert (LOG.level, LOG.handlers) == before


@pytest.mark.usefixtures("hasty")
def test_a_closed_stderr_is_no_error(monkeypatch, tmp_path):
    with (tmp_path / "closed").open("w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
    with progress("best plan"):
        time.sleep(0.05)


@pytest.mark.usefixtures("hasty")
def test_a_document_is_alone_on_stdout(run):
    ran = run("plan", "gpt3-125m", "dgx-a100", "--global-batch", "32", "--json")
    assert json.loads(ran.out)["plan"]
    assert ran.err.startswith("progress: best plan")


def test_on_a_terminal_it_is_redrawn():
    """One line that is gone at the end; stdout is not touched."""
    code = (
        "import time; from wavetrain.commands import progress as p; p.FIRST_S = 0.0\n"
        "with p.progress('best plan'): time.sleep(0.6)\n"
        "print('done')"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=theirs, stdout=subprocess.PIPE, env=environment, check=True, text=True
    )
    os.close(theirs)
    drawn = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.stdout == "done\n"
    assert "best plan" in drawn
    assert "progress:" not in drawn
    assert "\x1b[2K" in drawn
