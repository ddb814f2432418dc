"""Tests whose ranks are on hosts of their own (`wavetrain.runtime.virtual`)."""

from __future__ import annotations

import os

import pytest

# CI is root and must run them: there, a missing `ip` command is a failure, not a reason to skip.
needs_namespaces = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
