"""Figures as SVG and PNG files. A browser draws them: nothing else draws what plotly describes as plotly does."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from wavetrain.base.errors import InputError, Problem, RunError
from wavetrain.show.page import label, part, plotly_script, render
from wavetrain.show.study_lines import Figure

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FORMATS = ("svg", "png")
WIDE, SMALL = 1080, 760
AT_ONCE = 12  # figures that one browser draws, which bounds the text it hands over
PATIENCE_S = 180
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
)
_KEPT = re.compile(r'<pre id="picture" data-name="([\w.-]*)" data-format="(\w+)">([^<]*)</pre>')


def pictures(figures: Sequence[Figure], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Every figure in every format, in `folder`; the paths that were written."""
    browser = found_browser()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for first in range(0, len(figures), AT_ONCE):
        for name, form, content in _drawn(browser, figures[first : first + AT_ONCE], formats):
            path = folder / f"{name}.{form}"
            path.write_bytes(content)
            written.append(path)
    return written


def found_browser() -> str:
    """The path of a Chromium."""
    for name in BROWSERS:
        path = shutil.which(name)
        if path is not None:
            return path
    rule = "pictures are drawn by Chromium, and there is none on PATH"
    raise InputError(Problem(where="--pictures", rule=rule, legal=BROWSERS, remedy="apt install chromium"))


def pictures_page(figures: Sequence[Figure], formats: Sequence[str]) -> str:
    """A page that draws figures one after the other and leaves each as text."""
    given = [
        {
            "name": figure.id,
            "title": label(f"{figure.title}: {figure.of}" if figure.of else figure.title, 160),
            "width": SMALL if figure.is_small else WIDE,
            "data": list(figure.data),
            "layout": figure.layout,
        }
        for figure in figures
    ]
    return render(
        "page.html",
        styles=("page.css",),
        scripts=(plotly_script(), part("draw.js"), part("pictures.js")),
        data={"figures": given, "formats": list(formats)},
    )


def _drawn(browser: str, figures: Sequence[Figure], formats: Sequence[str]) -> Iterator[tuple[str, str, bytes]]:
    with tempfile.TemporaryDirectory(prefix="wavetrain-") as name:
        folder = Path(name)
        page = folder / "page.html"
        page.write_text(pictures_page(figures, formats), encoding="utf-8")
        profile = f"--user-data-dir={folder / 'profile'}"
        command = [browser, *QUIET, profile, "--virtual-time-budget=600000", "--dump-dom", page.as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            raise RunError(f"{browser} did not draw {len(figures)} figures in {PATIENCE_S} s") from None
    found = [(name, form, text) for name, form, text in _KEPT.findall(done.stdout)]
    failed = [unquote(text) for _, form, text in found if form == "error"]
    if failed or len(found) != len(figures) * len(formats):
        why = failed[0] if failed else done.stderr.strip().rpartition("\n")[2]
        raise RunError(f"{browser} drew {len(found)} of {len(figures) * len(formats)} pictures: {why[:300]}")
    for name, form, text in found:
        yield name, form, base64.b64decode(text) if form == "png" else unquote(text).encode()
