"""What all pages share: a page is one HTML file that holds all it needs and asks no one for anything.

Names come from files that strangers wrote. Three readers see them, and each has its own escape: HTML (templates
escape), a script element (`script_json`), and plotly, which reads tags in its labels (`label`).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import printable

FOLDER = "wavetrain.show"


def render(
    template: str, *, styles: Sequence[str], scripts: Sequence[str] = (), data: object = None, **values: object
) -> str:
    """A template of this folder with these style sheets; `scripts` run at its end and read `data`, which is JSON."""
    with needed():
        from jinja2 import Environment, FunctionLoader, StrictUndefined  # noqa: PLC0415 - optional, and slow to import
        from markupsafe import Markup  # noqa: PLC0415

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(part)
    )
    environment.filters["short"] = short
    style = "".join(part(name) for name in styles)
    text: str = environment.get_template(template).render(
        policy=policy(style, scripts),
        style=Markup(style),  # noqa: S704 - ours, no word from a file
        scripts=[Markup(script) for script in scripts],  # noqa: S704 - ours and plotly's
        data=Markup(script_json(data)),  # noqa: S704 - escaped there
        **values,
    )
    return text


def part(name: str) -> str:
    """A template, style sheet or script of this folder, as a browser reads it."""
    return _as_read(resources.files(FOLDER).joinpath(name).read_text(encoding="utf-8"))


def plotly_script() -> str:
    """The code of plotly that is installed."""
    with needed():
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # noqa: PLC0415

    return _as_read(get_plotlyjs())


def _as_read(text: str) -> str:
    """A browser hashes a script after it made these one."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


@contextmanager
def needed() -> Iterator[None]:
    """Around imports of what the extra `report` installs."""
    try:
        yield
    except ImportError as error:
        rule = f"an HTML page needs {error.name or 'plotly and jinja2'}, which is not installed"
        raise InputError(Problem(where="--html", rule=rule, remedy="pip install 'wavetrain[report]'")) from None


def policy(style: str, scripts: Sequence[str] = ()) -> str:
    """A content security policy: these scripts and styles, no request whatever. Plotly sets styles of elements."""
    rules = ["default-src 'none'"]
    if scripts:
        rules += [f"script-src {_digests(scripts)}", "style-src 'unsafe-inline'", "img-src data: blob:"]
    else:
        rules += [f"style-src {_digests([style])}"]
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))


def _digests(texts: Iterable[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def script_json(value: object) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or a line."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII, so U+2028 and U+2029 are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def clean(text: str, most: int = 120) -> str:
    """Text without what a reader can't see: control characters, marks that turn the direction of writing."""
    return printable(text, most=most)


def label(text: str, most: int = 60) -> str:
    """Text for a label of plotly, which would take tags and entities for markup."""
    return html.escape(clean(text, most), quote=False)


def short(value: float) -> str:
    """A length in as few characters as say it."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
