"""Tests whose ranks are on hosts of their own (`wavetrain.runtime.virtual`)."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

import pytest

from wavetrain.runtime.virtual import why_not

PATIENCE_S = 20.0

# CI is root and must run them: there, a missing `ip` command is a failure, not a reason to skip.
needs_namespaces = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
needs_delay = pytest.mark.skipif(  # a container may have namespaces, but no taps
    os.geteuid() != 0 or (not why_not() and bool(why_not(delay=True))), reason=why_not(delay=True) or "is there"
)


def namespaces(pid: int | None = None) -> list[str]:
    """Those of a process, which is this one: other workers have theirs at the same time."""
    listed = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True, timeout=20).stdout
    own = f"wt{os.getpid() if pid is None else pid}n"
    return [line.split()[0] for line in listed.splitlines() if line.startswith(own)]


def at_least_once(measure: Callable[[], float], *, least: float, most: float) -> None:
    """Never more than `most`, and `least` within some seconds: what else runs on this machine only slows."""
    until = time.monotonic() + PATIENCE_S
    while True:
        found = measure()
        assert found <= most
        if found >= least:
            return
        assert time.monotonic() < until, f"{found:.4g} is below {least:.4g}"
