"""Hosts of a run under torchrun's own agents, forked: nothing is imported again. Killed, cut off and brought back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from wavetrain.base.document import parse_json
from wavetrain.cli import main
from wavetrain.runtime.board import process_state
from wavetrain.runtime.learner import Done, Learner

SLOW_S = 1.0  # that a step takes longer while the test waits for something
RENDEZVOUS = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}


@dataclass
class Elastic:
    """A run: `words` are those of `wavetrain train`. Host 0 keeps the rendezvous."""

    root: Path
    words: list[str]
    address: str = "127.0.0.1"
    enter: Callable[[int], None] = lambda _: None  # to be that host
    port: int = 0
    hosts: int = 2
    ranks_each: int = 2
    pace_s: float = 0.05  # that a step takes longer, so that things can happen meanwhile
    agents: dict[int, int] = field(default_factory=dict)  # by host, the process

    def __post_init__(self) -> None:
        with socket.socket() as one:  # below the ports of outgoing connections, so that none takes it meanwhile
            for self.port in range(20000 + os.getpid() % 8000, 32000):
                with contextlib.suppress(OSError):
                    one.bind(("127.0.0.1", self.port))
                    break

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def _slow(self) -> Path:
        return self.root / "slow"

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """So that no step is the last one meanwhile."""
        self._slow.touch()
        try:
            yield
        finally:
            self._slow.unlink()

    @property
    def num_started(self) -> int:
        """Ranks, in all attempts."""
        return len((self.root / "started").read_text().split())

    def start(self, host: int) -> None:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                os.setsid()
                log = os.open(self.root / f"host-{host}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                self.enter(host)
                code = self._agent(host)
            finally:
                os._exit(code)
        self.agents[host] = pid

    def _agent(self, host: int) -> int:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=self.hosts,
            nproc_per_node=self.ranks_each,
            max_restarts=100,
            monitor_interval=0.05,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{self.address}:{self.port}",
            rdzv_configs=RENDEZVOUS | {"is_host": "true" if host == 0 else "false"},
            local_addr=self.address if host == 0 else None,
            start_method="fork",
            run_id="test",
        )

        def rank() -> None:
            with (self.root / "started").open("a") as stream:
                stream.write(f"{os.environ['RANK']}\n")
            slowed(lambda: SLOW_S if self._slow.exists() else self.pace_s)
            sys.exit(main(["train", *self.words, "-o", str(self.out)]))

        try:
            elastic_launch(config, rank)()
        except ChildFailedError:
            return 1
        return 0

    def kill(self, host: int) -> None:
        """The host is gone: its agent and its ranks, without a word."""
        for pid in reversed(self.processes(host)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.waitpid(self.agents.pop(host), 0)

    def processes(self, host: int) -> list[int]:
        """An agent and its ranks."""
        found = [self.agents[host]]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        return found

    def ranks(self, host: int) -> list[int]:
        return [pid for pid in self.processes(host)[1:] if process_state(pid) not in "XZ"]

    def steps(self) -> list[int]:
        """Of the log, in the order in which they were done."""
        try:
            lines = (self.out / "log.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def await_step(self, step: int, seconds: float = 60.0) -> None:
        self.until(lambda: bool(self.steps()) and self.steps()[-1] >= step, seconds)

    def until(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.02)

    def end(self, host: int, seconds: float = 90.0) -> int:
        """How an agent ended."""
        pid = self.agents[host]
        found: list[int] = []

        def is_over() -> bool:
            done, status = os.waitpid(pid, os.WNOHANG)
            found.extend([status] if done else [])
            return bool(done)

        self.until(is_over, seconds)
        del self.agents[host]
        return os.waitstatus_to_exitcode(found[0])

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.root.glob("*.log")))

    def worlds(self) -> list[int]:
        """How many ranks saved each step, without repetitions."""
        found: list[int] = []
        for path in sorted((self.root / "checkpoints").glob("step-*/manifest.json")):
            node = parse_json(path.read_text(), file=str(path)).plain()
            assert isinstance(node, dict)
            if not found or found[-1] != len(node["shards"]):
                found.append(len(node["shards"]))
        return found


def slowed(pace_s: Callable[[], float]) -> None:
    """From now on, in this process."""
    step = Learner.step

    def slow(self: Learner, number: int) -> Done:
        time.sleep(pace_s())
        return step(self, number)

    Learner.step = slow  # type: ignore[method-assign]


@contextlib.contextmanager
def elastic(run: Elastic) -> Iterator[Elastic]:
    """All hosts, started; gone at the end."""
    for host in range(run.hosts):
        run.start(host)
    try:
        yield run
    finally:
        for host in list(run.agents):
            run.kill(host)
