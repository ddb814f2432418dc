"""The command line: commands, no logic. `--json` prints one document on stdout; errors go to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavetrain import __version__
from wavetrain.base.errors import InputError, Problem, WavetrainError, nearest
from wavetrain.base.units import DType

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wavetrain.cluster import Cluster
    from wavetrain.model import Model

CHECK_FAILED = 5

app = typer.Typer(
    name="wavetrain",
    help="Plan, predict and run the training of large models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        app(args=arguments, prog_name="wavetrain")
    except SystemExit as done:  # how typer ends, also after it has explained a wrong option
        return done.code if isinstance(done.code, int) else 0
    except WavetrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        print(f"wavetrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Plan, predict and run the training of large models."""


@app.command()
def describe(
    target: Annotated[str, typer.Argument(help="A model or cluster: a name, a file, or a node type with a count.")],
    seq_len: Annotated[int | None, typer.Option(help="Sequence length; default: the model's own.")] = None,
    microbatch: Annotated[int, typer.Option(min=1, max=10**9, help="Sequences in a microbatch.")] = 1,
    dtype: Annotated[str, typer.Option(help="Number format of the activations.")] = "bf16",
    attention: Annotated[str, typer.Option(help="fused or unfused.")] = "fused",
    as_json: AsJson = False,
) -> None:
    """Say what was understood from a model or a cluster."""
    from wavetrain.cluster import Cluster
    from wavetrain.model import AttentionKernel, Work
    from wavetrain.show.cluster import cluster_card, cluster_document
    from wavetrain.show.model import model_card, model_document

    kernel = AttentionKernel(_one_of("--attention", attention, tuple(AttentionKernel)))
    number_format = DType(_one_of("--dtype", dtype, tuple(DType)))
    described = load(target, seq_len=seq_len)
    if isinstance(described, Cluster):
        _print(cluster_document(described), cluster_card(described), as_json)
        return
    work = Work(described.seq_len, microbatch, number_format, kernel)
    _print(model_document(described, work), model_card(described, work), as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine and say what to fix."""
    from wavetrain.base.codec import encode
    from wavetrain.doctor import State, examine
    from wavetrain.show.tables import grid

    checks = examine()
    table = grid("check", "", "found", "remedy")
    for check in checks:
        table.add_row(check.name, check.state, check.found, check.remedy)
    bad = any(check.state is State.BAD for check in checks)
    document = {"schema": "wavetrain.doctor/1", "ok": not bad, "checks": [encode(check) for check in checks]}
    _print(document, table, as_json)
    if bad:
        raise typer.Exit(CHECK_FAILED)


def load(target: str, *, seq_len: int | None = None) -> Model | Cluster:
    """Read a target that may be a model or a cluster, by name or by what its file says."""
    from wavetrain.base.document import exists, read_document
    from wavetrain.cluster import device_names, load_cluster, node_names, read_cluster
    from wavetrain.cluster.read import IDENTIFYING as CLUSTER_KEYS
    from wavetrain.model import load_model, presets, read_model
    from wavetrain.model.short import IDENTIFYING as MODEL_KEYS

    kind = target.partition(":")[0]
    if kind in node_names() or kind in device_names():
        return load_cluster(target)
    path = Path(target)
    if target in presets() or (exists(path) and path.is_dir()):
        return load_model(target, seq_len=seq_len)
    if not exists(path):
        raise InputError(_unknown(target, (*presets(), *node_names(), *device_names())))
    node = read_document(path)
    keys = set(node.value) if isinstance(node.value, dict) else set()
    if keys & {"schema", "model_type"} or (keys & set(MODEL_KEYS) and not keys & set(CLUSTER_KEYS)):
        return read_model(node, seq_len=seq_len)
    if keys & set(CLUSTER_KEYS):
        return read_cluster(node)
    raise _neither(node.where, keys, (*MODEL_KEYS, *CLUSTER_KEYS, "schema", "model_type"))


def _neither(where: str, keys: set[str], legal: tuple[str, ...]) -> InputError:
    near = {key: nearest(key, legal) for key in sorted(keys)}
    rule = "neither a model (layers, hidden, heads, vocab ...; or model_type) nor a cluster (node, nodes ...)"
    problems = [Problem(where=where, key=key, rule="unknown key", nearest=n) for key, n in near.items() if n]
    return InputError([Problem(where=where, key=", ".join(sorted(keys)[:5]), rule=rule), *problems])


def _unknown(target: str, names: tuple[str, ...]) -> Problem:
    if "/" in target or target.lower().endswith((".json", ".yaml", ".yml")):
        return Problem(where=target, rule="no such file")
    near = nearest(target.partition(":")[0], names)
    return Problem(where=target, rule="no model, node type or device of that name, and no such file", nearest=near)


def _one_of(option: str, value: str, legal: Sequence[str]) -> str:
    if value not in legal:
        rule = f"unknown value {value}"
        raise InputError(Problem(where=option, rule=rule, legal=tuple(legal), nearest=nearest(value, legal)))
    return value


def _print(document: dict[str, Any], card: RenderableType, as_json: bool) -> None:
    if as_json:
        from wavetrain.base.codec import dumps

        print(dumps(document), end="")
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    with console.capture() as captured:
        console.print(card)
    for line in captured.get().splitlines():
        print(line.rstrip())  # a table pads its last column
