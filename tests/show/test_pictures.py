"""Figures as files: drawn by a real browser, complete, and clear words where there is none."""

import shutil
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.show.browser import needs_browser
from tests.show.studies import records, study

from wavetrain.base.errors import InputError, RunError
from wavetrain.show import pictures as module
from wavetrain.show.pictures import SMALL, WIDE, pictures
from wavetrain.show.study_figures import figures

NAME = "</script><img src=x onerror=alert(1)> \u202e"


def some():
    found = {figure.id: figure for figure in figures(study(), records(names=(NAME, "tp 2", "ddp")))}
    return [found["throughput-1"], found["map-strategies-1"], found["memory-1"]]


@needs_browser
def test_every_figure_in_every_format(tmp_path):
    written = pictures(some(), tmp_path / "new")
    names = ["throughput-1", "map-strategies-1", "memory-1"]
    assert [path.name for path in written] == [f"{name}.{form}" for name in names for form in ("svg", "png")]
    for path, width in zip(written, (WIDE, WIDE, WIDE, WIDE, SMALL, SMALL), strict=True):
        if path.suffix == ".png":
            head = path.read_bytes()[:24]
            assert head.startswith(b"\x89PNG")
            assert struct.unpack(">I", head[16:20])[0] == 2 * width
            continue
        tree = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert float(tree.get("width")) == width
        tags = {element.tag.rpartition("}")[2] for element in tree.iter()}
        assert not tags & {"script", "a", "foreignObject"}
    said = "".join(ElementTree.fromstring(written[0].read_text(encoding="utf-8")).itertext())
    assert "</script><img src=x" in said
    assert "\u202e" not in said


def test_a_browser_draws_few_at_once(tmp_path, monkeypatch):
    drawn = []

    def draw(_, own, formats):
        drawn.append([figure.id for figure in own])
        return [(figure.id, form, b"x") for figure in own for form in formats]

    monkeypatch.setattr(module, "_drawn", draw)
    monkeypatch.setattr(module, "found_browser", lambda: "chromium")
    monkeypatch.setattr(module, "AT_ONCE", 2)
    written = pictures(some(), tmp_path, ("svg",))
    assert drawn == [["throughput-1", "map-strategies-1"], ["memory-1"]]
    assert [path.read_bytes() for path in written] == [b"x"] * 3


def test_without_a_browser_what_to_install_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="apt install chromium") as caught:
        pictures(some(), tmp_path / "new")
    assert "google-chrome" in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "says", ["exit 1", 'echo \'<pre id="picture" data-name="" data-format="error">no%20room</pre>\'']
)
def test_a_browser_that_fails_is_told(tmp_path, monkeypatch, says):
    browser = tmp_path / "chromium"
    browser.write_text(f"#!/bin/sh\necho it broke >&2\n{says}\n")
    browser.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(browser) if name == "chromium" else None)
    with pytest.raises(RunError, match=r"of 6 pictures: (it broke|no room)"):
        pictures(some(), tmp_path / "new")
    assert list(Path(tmp_path / "new").iterdir()) == []
