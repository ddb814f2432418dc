"""`wavetrain export`: a plan in the words of another program, or a checkpoint's model as transformers reads it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from wavetrain.base.document import exists
from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import format_bytes, printable
from wavetrain.commands.shared import AsJson, one_of, refuse_beside, show, write

MODEL = "transformers"  # the one target that a checkpoint has


def export(
    source: Annotated[Path, typer.Argument(help="A plan file, or a directory of checkpoints.")],
    to: Annotated[
        str | None,
        typer.Option(help="torchtitan, megatron, deepspeed, accelerate, fsdp2 ... Of a checkpoint: transformers."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="config.json to go with a checkpoint's model.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a file instead of printing; of a model, a directory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan in the words of another program, or a checkpoint's model as safetensors."""
    if exists(source) and source.is_dir():
        _export_model(source, to, output, config, as_json)
    else:
        _export_plan(source, to, output, config, as_json)


def _export_plan(source: Path, to: str | None, output: Path | None, config: Path | None, as_json: bool) -> None:
    from wavetrain.base.codec import dumps
    from wavetrain.plan import read_plan
    from wavetrain.plan.export import EXPORTERS
    from wavetrain.plan.export import export as exported

    refuse_beside("a plan file", {"--config": config})
    if to is None:
        raise InputError(Problem(where="--to", rule="missing: the program to write a plan for", legal=tuple(EXPORTERS)))
    found = exported(read_plan(source), to)
    text = dumps(found.document()) if as_json else found.text
    for note in found.not_expressed:
        print(f"not expressed: {printable(note, most=400)}", file=sys.stderr)
    if output is not None:
        write(output, found.text)
    if output is None or as_json:
        print(text, end="")


def _export_model(source: Path, to: str | None, output: Path | None, config: Path | None, as_json: bool) -> None:
    from wavetrain.runtime.exported import export_checkpoint
    from wavetrain.show.tables import facts

    one_of("--to", to or MODEL, (MODEL,))
    if output is None:
        raise InputError(Problem(where="--output", rule="missing: the directory to write the model to"))
    found = export_checkpoint(source, output, config=config)
    for line in found.passed_over:
        print(f"passed over: {printable(line, most=400)}", file=sys.stderr)
    document = {
        "schema": "wavetrain.export.model/1",
        "checkpoint": str(found.checkpoint.path),
        "run": found.checkpoint.run,
        "step": found.checkpoint.step,
        "directory": str(found.directory),
        "files": list(found.files),
        "num_tensors": len(found.checkpoint.names()),
        "bytes": found.num_bytes,
        "passed_over": list(found.passed_over),
    }
    rows = [
        ("checkpoint", f"{printable(found.checkpoint.path, most=400)}, after {found.checkpoint.step} steps"),
        ("tensors", f"{document['num_tensors']:,}, {format_bytes(found.num_bytes)}"),
        ("files", f"{len(found.files)} of safetensors"),
    ]
    show(document, facts(f"wrote {printable(output, most=400)}", rows), as_json)
