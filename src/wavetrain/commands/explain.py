"""`wavetrain explain`: why this plan, why not another, what would change it, how sure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wavetrain.base.errors import InputError, Problem
from wavetrain.commands.progress import progress
from wavetrain.commands.shared import AsJson, show


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    instead: Annotated[str | None, typer.Option(help="Another plan to compare with: tp=8,pp=1.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for what would change it; 15.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say why a plan is as it is, why not another, what would change it, and how sure that is."""
    from wavetrain.commands.asked import pins_of_text, seconds_of
    from wavetrain.commands.plan import read_with_certificate
    from wavetrain.planner.certificate import question_of
    from wavetrain.planner.explain import FLIPS_S, own_question
    from wavetrain.planner.explain import explain as explained
    from wavetrain.show.explain import explanation_card, explanation_document

    pins = pins_of_text(instead) if instead is not None else None
    limit = seconds_of("--timeout", timeout) or FLIPS_S
    made, certificate = read_with_certificate(plan)
    if certificate is None:
        question, gap = own_question(made), None
    else:
        try:
            question, gap = question_of(made, certificate), float(certificate["gap"])
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            rule = "can't be read"
            remedy = "wavetrain plan --verify says what is wrong with it"
            raise InputError(Problem(where=str(plan), key="certificate", rule=rule, remedy=remedy)) from None
    with progress("why, and what would change it"):
        found = explained(question, made, gap=gap, pins=pins, name=instead or "", flips_limit_s=limit)
    show(explanation_document(found), explanation_card(found), as_json)
