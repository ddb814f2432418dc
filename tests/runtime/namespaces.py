"""A small network on this machine: hosts are network namespaces, joined by a bridge. Needs root and `ip`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_NETS = ("192.0.2", "198.51.100", "203.0.113")  # RFC 5737: addresses that nobody else has
_BLOCK = 32  # addresses of one network of ours
_LIBC = ctypes.CDLL(None, use_errno=True)

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and the `ip` command"
)


@dataclass(frozen=True)
class Host:
    """One namespace; `interface` has the same name in each."""

    name: str
    address: str
    cable: str  # the bridge's end
    interface: str = "eth0"

    def enter(self) -> None:
        """Move this process there (it must have one thread only); gloo uses the interface from then on."""
        with Path(f"/run/netns/{self.name}").open() as file:
            if _LIBC.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.name}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def cut(self, *, seen_from: int | None = None) -> None:
        """Pull the cable, from the network that process `seen_from` is in."""
        _ip(f"link set {self.cable} down", seen_from)

    def mend(self, *, seen_from: int | None = None) -> None:
        _ip(f"link set {self.cable} up", seen_from)


@dataclass(frozen=True)
class Network:
    """`address` is the bridge's own: this machine as the hosts see it."""

    address: str
    hosts: tuple[Host, ...]


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[Network]:
    """Hosts on one bridge, all removed at the end; names and addresses are this process's own."""
    tag = f"wt{os.getpid()}"
    bridge = f"{tag}b"
    prefix, base = _free_block()
    hosts = tuple(Host(f"{tag}n{i}", f"{prefix}.{base + 2 + i}", f"{tag}c{i}") for i in range(num_hosts))
    assert num_hosts <= _BLOCK - 3
    try:
        _ip(f"link add {bridge} type bridge")
        _ip(f"addr add {prefix}.{base + 1}/27 dev {bridge}")
        _ip(f"link set {bridge} up")
        for host in hosts:
            _ip(f"netns add {host.name}")
            _ip(f"link add {host.cable} type veth peer name {host.interface} netns {host.name}")
            _ip(f"link set {host.cable} master {bridge} up")
            _ip(f"-n {host.name} addr add {host.address}/27 dev {host.interface}")
            _ip(f"-n {host.name} link set {host.interface} up")
            _ip(f"-n {host.name} link set lo up")
        yield Network(f"{prefix}.{base + 1}", hosts)
    finally:
        for host in hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"link del {host.cable}")  # at once: a namespace lives as long as a process in it
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns del {host.name}")
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip(f"link del {bridge}")


def _free_block() -> tuple[str, int]:
    taken = _ip("-4 -o addr show")
    blocks = [(net, base) for net in _NETS for base in range(0, 256, _BLOCK)]
    first = os.getpid() % len(blocks)
    return next(b for b in blocks[first:] + blocks[:first] if f" {b[0]}.{b[1] + 1}/" not in taken)


def _ip(words: str, seen_from: int | None = None) -> str:
    where = ["nsenter", f"--net=/proc/{seen_from}/ns/net"] if seen_from else []
    command = [*where, "ip", *words.split()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
