"""Shared by all tests: no network, one thread per process, and a way to run the command line."""

import logging
import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from wavetrain.cli import main

settings.register_profile("wavetrain", deadline=None, derandomize=True, database=None)
settings.load_profile("wavetrain")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts behind; Ctrl-C is tested all the same
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Run a wavetrain command in this process; the root logger, which commands set up, is put back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def run(*arguments: str) -> Ran:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    yield run
    root.handlers[:], root.level = handlers, level
