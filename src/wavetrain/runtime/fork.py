"""Processes that are forked from this one: they need no second import of torch, and die with it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from wavetrain.base.errors import RunError, WavetrainError
from wavetrain.runtime.world import World, connect

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore
else:
    from torch.distributed import PrefixStore

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_LIBC = ctypes.CDLL(None, use_errno=True)


def fork() -> int:
    """The new process's number, and in that process 0: there signals are as usual, and it ends when its parent does."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of any thread; those of BLAS are idle, and nobody needs those of a rank's heartbeat.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before this was asked for
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return pid


def apart(world: World, name: str, work: Callable[[World], Any]) -> Any:
    """What `work` returns, as JSON has it, in a new process at the same place, with keys of the store for itself.

    What a process did before makes it slower and its times less alike: torch keeps groups, their threads and
    connections, and memory is in pieces. Ranks that go on for a while therefore do each part of their work apart.
    """
    source, target = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(source)
        _tell(target, world, name, work)
    os.close(target)
    with open(source, "rb") as stream:  # noqa: PTH123 - of a pipe
        said = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code or not said:
        raise RunError(f"{name}: its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")
    told = json.loads(said)
    if "trace" in told:  # not foreseen: the report has it
        raise RuntimeError(f"{name}: {told['error']}\n{told['trace']}")
    if "error" in told:
        raise RunError(f"{name}: {told['error']}")
    return told["found"]


def _tell(target: int, world: World, name: str, work: Callable[[World], Any]) -> NoReturn:
    code = 1
    try:
        # the parent's connection is the parent's: two processes would read each other's answers
        own = replace(world, store=PrefixStore(name, connect(world.place)))
        said = json.dumps({"found": work(own)})
    except WavetrainError as error:
        said = json.dumps({"error": str(error)})
    except BaseException as error:
        said = json.dumps({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
    try:
        with open(target, "wb") as stream:
            stream.write(said.encode())
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)
