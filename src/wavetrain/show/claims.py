"""Claims of published works beside ours: a table for people, a document for machines, the page `docs/claims.md`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wavetrain.base.units import printable
from wavetrain.show.tables import grid
from wavetrain.study.claims import WORKS, Claim

Json = dict[str, Any]
SCHEMA = "wavetrain.claims/1"
TITLES = {
    "Hanayo": "Hanayo: waves in pipelines (SC'23, arXiv 2308.15762)",
    "OSDP": "OSDP: what to shard and what not (IJCAI 2023, arXiv 2209.13258)",
    "Hardware scaling": "Hardware scaling: where more accelerators stop paying (TMLR 2025, arXiv 2411.13055)",
}
COMMAND = "wavetrain study --validate-claims --markdown docs/claims.md"
READING = textwrap.fill(
    """\
Simulated is what our simulator finds: from the records of the ready studies, or of the very layouts that were run.
Executed is what our runtime took on this project's machine (two cores, no GPU), where there is such a run: other
hardware than the work's, judged by the same rule. A claim holds where the simulated number is within the bounds of its
rule; a verdict that it does not hold states them. Where the work states no number, the rule is the direction that it
states. What a work leaves open is assumed: numbers in the last column refer to the list under each table.""",
    width=118,
    break_on_hyphens=False,
)
ESCAPED = str.maketrans({c: f"&#{ord(c)};" for c in "<>&|`[]*\\~_"})  # what acts in a table of Markdown or HTML


# --- for machines ---


def claims_document(claims: Iterable[Claim]) -> Json:
    listed = list(claims)
    return {
        "schema": SCHEMA,
        "hold": sum(claim.holds for claim in listed),
        "claims": [_claim_document(claim) for claim in listed],
    }


def _claim_document(claim: Claim) -> Json:
    verdict, run = claim.verdict, claim.executed
    return {
        "work": claim.work,
        "claim": claim.text,
        "source": claim.source,
        "published": list(claim.published) if isinstance(claim.published, tuple) else claim.published,
        "ours": _finite(claim.ours),
        "unit": claim.unit,
        "least": _finite(claim.bounds.least),
        "most": _finite(claim.bounds.most),
        "difference": _finite(claim.difference),
        "holds": verdict.holds,
        "verdict": verdict.words,
        "assumption": claim.assumption,
        "executed": None
        if run is None
        else {
            "value": _finite(run.value),
            "holds": verdict.executed_holds,
            "how": run.how,
            "command": run.command,
            "date": run.date,
        },
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# --- for people ---


def claims_table(claims: Iterable[Claim]) -> RenderableType:
    """A table per work in eighty columns, and how many hold."""
    listed = list(claims)
    parts: list[RenderableType] = []
    for work in WORKS:
        own = [claim for claim in listed if claim.work == work]
        if own:
            parts += [Text(f"{TITLES[work]}: {_count(own)}", style="bold"), _work_table(own), ""]
    return Group(*parts, Text(_count(listed), style="bold"))


def _work_table(claims: Sequence[Claim]) -> Table:
    table = grid("claim and its source", ">published", ">ours", ">executed", "verdict")
    table.columns[0].width, table.columns[-1].width = 27, 21  # of eighty; numbers get what is left
    table.padding = (0, 1, 0, 0)
    for claim in claims:
        words = Text(printable(claim.text, most=200))
        words.append(f"\n{printable(claim.source, most=200)}", style="dim")
        table.add_row(words, *_numbers(claim), _verdict_text(claim))
    return table


def _verdict_text(claim: Claim) -> Text:
    verdict = claim.verdict
    fine = verdict.holds and verdict.executed_holds is not False
    return Text(verdict.words, style="" if fine else "bold red")


def _count(claims: Sequence[Claim]) -> str:
    """How many hold, by simulation, and how many of those that were executed did not."""
    executed = [claim for claim in claims if claim.executed is not None]
    words = f"{sum(claim.holds for claim in claims)} of {len(claims)} claims hold"
    if executed:
        words += f", as executed {sum(bool(c.verdict.executed_holds) for c in executed)} of {len(executed)}"
    return words


def _numbers(claim: Claim) -> tuple[str, str, str]:
    """Published, simulated, executed."""
    run = claim.executed
    if isinstance(claim.published, tuple):
        published = " to ".join(_number(end, "") for end in claim.published) + f" {claim.unit}"
    else:
        published = _number(claim.published, claim.unit)
    return published, _number(claim.ours, claim.unit), "" if run is None else _number(run.value, claim.unit)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    size = abs(value)
    digits = 0 if unit == "devices" or size >= 999.5 else 2 if size < 99.995 else 1
    return f"{value:z,.{digits}f} {unit}".strip()


# --- the page ---


def claims_markdown(claims: Iterable[Claim]) -> str:
    """The whole page; equal for equal claims."""
    listed = list(claims)
    parts = ["# Claims of three works, and ours", f"Generated by `{COMMAND}`; do not edit. {_count(listed)}.", READING]
    for work in WORKS:
        own = [claim for claim in listed if claim.work == work]
        if own:
            parts += [f"## {TITLES[work]}", f"{_count(own)}.", _table(own), *_under(own)]
    parts += _runs(listed)
    return "\n\n".join(parts) + "\n"


HEADER = ("claim", "source", "published", "simulated", "executed", "verdict", "assumed")
RULE = ("---", "---", "---:", "---:", "---:", "---", "---:")


def _table(claims: Sequence[Claim]) -> str:
    notes = {note: str(number) for number, note in enumerate(_assumptions(claims), start=1)}
    rows = []
    for claim in claims:
        bold = "" if claim.holds and claim.verdict.executed_holds is not False else "**"
        cells = [*map(_text, (claim.text, claim.source, *_numbers(claim)))]
        rows.append([*cells, f"{bold}{_text(claim.verdict.words)}{bold}", notes.get(claim.assumption, "")])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEADER, RULE, *rows))


def _assumptions(claims: Sequence[Claim]) -> list[str]:
    """In the order of their first use, each once."""
    return list(dict.fromkeys(claim.assumption for claim in claims if claim.assumption))


def _under(claims: Sequence[Claim]) -> Iterator[str]:
    """What stands under a table: all that does not hold, in so many words, and what was assumed."""
    failed = [claim for claim in claims if not claim.holds]
    apart = [claim for claim in claims if claim.holds and claim.verdict.executed_holds is False]
    for title, chosen in (("These do not hold:", failed), ("These hold simulated, but not as executed:", apart)):
        if chosen:
            yield title
            yield "\n".join(f"- {_text(claim.text)} ({_text(claim.source)}): {_judged(claim)}." for claim in chosen)
    notes = _assumptions(claims)
    if notes:
        yield "Assumed:"
        yield "\n".join(f"{number}. {_text(note)}" for number, note in enumerate(notes, start=1))


def _judged(claim: Claim) -> str:
    published, ours, took = _numbers(claim)
    words = f"published {published}, simulated {ours}" if claim.published is not None else f"simulated {ours}"
    return _text(f"{words}, executed {took}" if took else words)


def _runs(claims: Sequence[Claim]) -> Iterator[str]:
    """How everything that was executed was."""
    runs = dict.fromkeys((c.executed.command, c.executed.date, c.executed.how) for c in claims if c.executed)
    if runs:
        yield "## What was executed"
        yield "\n".join(f"- `{command}`, {date}: {_text(how)}." for command, date, how in runs)


def _text(text: str) -> str:
    return printable(text, most=1000).translate(ESCAPED)
