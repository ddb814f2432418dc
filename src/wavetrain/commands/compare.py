"""`wavetrain compare`: a prediction beside a run of the same plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wavetrain.commands.shared import AsJson, refuse_without, show, write, writing


def compare(
    prediction: Annotated[Path, typer.Argument(help="Plan file, as plan -o and simulate -o write it.")],
    measurement: Annotated[Path, typer.Argument(help="Directory that train -o wrote, or its run.json.")],
    refit: Annotated[
        bool, typer.Option("--refit", help="Scale the cluster's constants so that all terms agree.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the refitted cluster; with --refit.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with both timelines.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare what was predicted for a plan with what a run of it measured."""
    from wavetrain.cluster.write import write_cluster
    from wavetrain.plan import read_plan
    from wavetrain.show.compare import card, document
    from wavetrain.show.compare_html import page
    from wavetrain.sim.predict import simulate
    from wavetrain.study.compare import compare as compared
    from wavetrain.study.measured import read_run
    from wavetrain.study.refit import refit as refitted

    if not refit:
        refuse_without("--refit", {"--output": output})
    plan = read_plan(prediction)
    found = compared(plan, simulate(plan), read_run(measurement))
    changed = refitted(plan, found) if refit else None
    if html is not None:
        write(html, page(found, changed))
    if output is not None and changed is not None:
        with writing(output):
            write_cluster(changed.cluster, output)
    show(document(found, changed), card(found, changed), as_json)
