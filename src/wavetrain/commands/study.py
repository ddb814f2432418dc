"""`wavetrain study`: carry out a study, print what follows from it, write tables, figures and a report."""

from __future__ import annotations

import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wavetrain.base.errors import InputError, Problem
from wavetrain.commands.progress import progress
from wavetrain.commands.shared import AsJson, refuse_beside, show, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wavetrain.study.scaling.record import Record
    from wavetrain.study.scaling.run import Done
    from wavetrain.study.scaling.spec import Study
    from wavetrain.timeline.timeline import Timeline

MOST_JOBS = 1024
FOLDER = Path("out/studies")
REPORTS = ("plotly", "jinja2")  # what a report needs beside the core


def study(  # noqa: PLR0913, PLR0917 - one option each, as users type them
    file: Annotated[str | None, typer.Argument(help="A study file, or the name of a ready one.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder; out/studies/NAME.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; as many as cores.")] = None,
    no_report: Annotated[bool | None, typer.Option("--no-report", help="Write no HTML report.")] = None,
    pictures: Annotated[bool | None, typer.Option("--pictures", help="Write figures as SVG and PNG.")] = None,
    validate_claims: Annotated[
        bool | None, typer.Option("--validate-claims", help="Check the claims of three works instead.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the claims as Markdown.")] = None,
    list_ready: Annotated[bool | None, typer.Option("--list", help="Print the ready studies instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sweep models, hardware, devices and strategies: where more accelerators stop paying."""
    workers = _workers(jobs)
    if list_ready:
        refuse_beside("--list", {"FILE": file, "--output": output, "--validate-claims": validate_claims})
        _list(as_json)
    elif validate_claims:
        refuse_beside("--validate-claims", {"FILE": file, "--pictures": pictures, "--no-report": no_report})
        _claims(output or FOLDER, workers, markdown, as_json)
    elif file is None:
        from wavetrain.study.scaling.read import ready_names

        raise InputError(Problem(where="FILE", rule="missing: a study file, or a ready study", legal=ready_names()))
    else:
        refuse_beside("a study file", {"--markdown": markdown})
        _study(file, output, workers, report=not no_report, pictures=bool(pictures), as_json=as_json)


def _workers(jobs: int | None) -> int:
    if jobs is not None and not 1 <= jobs <= MOST_JOBS:
        raise InputError(Problem(where="--jobs", rule=f"{jobs}: must be from 1 to {MOST_JOBS}"))
    return jobs or len(os.sched_getaffinity(0))


def _list(as_json: bool) -> None:
    from wavetrain.show.study import ready_document, ready_table
    from wavetrain.study.scaling.read import load_study, ready_names

    found = [load_study(name) for name in ready_names()]
    show(ready_document(found), ready_table(found), as_json)


def _study(file: str, output: Path | None, workers: int, *, report: bool, pictures: bool, as_json: bool) -> None:
    from wavetrain.show.study import study_card, study_document
    from wavetrain.study.scaling.read import load_study

    asked = load_study(file)
    if pictures:
        from wavetrain.show.pictures import found_browser

        found_browser()  # what is missing is said before an hour of work
    if report and not all(map(find_spec, REPORTS)):
        print("note: no report: it needs plotly and jinja2; try: pip install 'wavetrain[report]'", file=sys.stderr)
        report = False
    folder = output or FOLDER / asked.name
    done = _carried_out(asked, folder, workers)
    document = study_document(asked, done)
    written = _write(asked, done, document, folder, report=report, pictures=pictures)
    show(document, study_card(asked, done, written), as_json)


def _carried_out(asked: Study, folder: Path, workers: int) -> Done:
    from wavetrain.study.scaling.run import run_study

    with progress(f"study {asked.name}") as heard:
        return run_study(asked, folder, jobs=workers, told=lambda status: heard.now(f"study {asked.name}: {status}"))


def _write(
    asked: Study, done: Done, document: dict[str, object], folder: Path, *, report: bool, pictures: bool
) -> list[Path]:
    """All files of a study; their paths."""
    from wavetrain.base.codec import dumps
    from wavetrain.show.study import records_csv, study_markdown
    from wavetrain.study.scaling.findings import findings

    texts = {
        "records.csv": records_csv(done.records),
        "study.json": dumps(document),
        "summary.md": study_markdown(asked, done),
    }
    steps = _timelines(done, folder) if report or pictures else {}
    if report:
        from wavetrain.show.study_html import study_page

        said = findings(asked, done.records)
        texts["report.html"] = study_page(asked, done.records, findings=said, timelines=steps)
    for name, text in texts.items():
        write(folder / name, text)
    written = [folder / name for name in texts]
    if pictures:
        from wavetrain.show.pictures import pictures as drawn
        from wavetrain.show.study_figures import figures
        from wavetrain.show.study_steps import step_figures

        written += drawn((*figures(asked, done.records), *step_figures(steps)), folder / "figures")
    return written


def _timelines(done: Done, folder: Path) -> dict[str, Timeline]:
    """The step of chosen points: the best plan at the smallest, a middle and the largest scale of one setting."""
    from wavetrain.plan import read_plan
    from wavetrain.show.study_groups import chosen
    from wavetrain.sim.predict import simulate
    from wavetrain.study.scaling.returns import best, setting_of

    found = best(done.records)
    widest = Counter(map(setting_of, found)).most_common(1)  # the first of those with most scales
    shown = chosen([record for record in found if setting_of(record) == widest[0][0]])
    return {record.where: simulate(read_plan(folder / record.plan_file)).timeline for record in shown}


def _claims(folder: Path, workers: int, markdown: Path | None, as_json: bool) -> None:
    from wavetrain.show.claims import claims_document, claims_markdown, claims_table
    from wavetrain.study.claims import all_claims
    from wavetrain.study.scaling.read import load_study

    def records(name: str) -> Sequence[Record]:
        return _carried_out(load_study(name), folder / name, workers).records

    claims = list(all_claims(records))
    if markdown is not None:
        write(markdown, claims_markdown(claims))
    show(claims_document(claims), claims_table(claims), as_json)  # a verdict is an answer, not a failure
