"""A small network on this machine: hosts are network namespaces, joined by a bridge in one more. Needs root and `ip`.

Nothing is added to the machine's own network, so addresses can't clash with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)

# CI is root and must run them: there, a missing `ip` command is a failure, not a reason to skip.
needs_namespaces = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@dataclass(frozen=True)
class Host:
    """One namespace with one interface, which has the same name in each."""

    name: str
    address: str
    hub: str
    cable: str  # the bridge's end
    interface: str = "eth0"

    def enter(self) -> None:
        """Move this process there (it must have one thread only); gloo uses the interface from then on."""
        _enter(self.name)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def cut(self) -> None:
        """Pull the cable."""
        _ip(f"-n {self.hub} link set {self.cable} down")

    def mend(self) -> None:
        _ip(f"-n {self.hub} link set {self.cable} up")

    def mislay(self, other: Host) -> None:
        """Send to nowhere what is for another host; what comes from it still arrives."""
        nobody = "02:00:00:00:00:99"
        _ip(f"-n {self.name} neigh replace {other.address} lladdr {nobody} nud permanent dev {self.interface}")


@dataclass(frozen=True)
class Network:
    """`address` is the hub's, where the bridge is and whoever starts the ranks."""

    hub: str
    address: str
    hosts: tuple[Host, ...]

    def prepare(self, rank: int) -> None:
        """For `run_local`: rank r lives on host r, in turns where there are fewer hosts."""
        self.hosts[rank % len(self.hosts)].enter()

    def run(self, act: Callable[[], int]) -> int:
        """The exit code of a forked process that does something at the hub."""
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                _enter(self.hub)
                code = act()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[Network]:
    """Hosts on one bridge, all removed at the end; the namespaces' names have this process's number."""
    hub = f"wt{os.getpid()}hub"
    hosts = tuple(Host(f"wt{os.getpid()}h{i}", f"192.0.2.{i + 2}", hub, f"cable{i}") for i in range(num_hosts))
    try:
        for name in (hub, *(host.name for host in hosts)):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        _ip(f"-n {hub} link add bridge0 type bridge")
        _ip(f"-n {hub} addr add 192.0.2.1/24 dev bridge0")
        _ip(f"-n {hub} link set bridge0 up")
        for host in hosts:
            _ip(f"-n {hub} link add {host.cable} type veth peer name {host.interface} netns {host.name}")
            _ip(f"-n {hub} link set {host.cable} master bridge0 up")
            _ip(f"-n {host.name} addr add {host.address}/24 dev {host.interface}")
            _ip(f"-n {host.name} link set {host.interface} up")
        yield Network(hub, "192.0.2.1", hosts)
    finally:
        for name in (*(host.name for host in hosts), hub):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns del {name}")


def _enter(name: str) -> None:
    with Path(f"/run/netns/{name}").open() as file:
        if _LIBC.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True, timeout=20)
