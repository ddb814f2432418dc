"""README and docs are executed: their commands, their Python, and the paths they name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"`((?:src|tests|docs|examples|benchmarks)/[\w./{}-]+)`|\]\(((?!http)[\w./-]+)\)")


def blocks(language: str) -> list:
    return [
        pytest.param(match.group(2), id=f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 1}")
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
        if match.group(1) == language
    ]


def shell(command: str) -> str:
    """What a command prints, in the repository, eighty columns wide."""
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    typed = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment = {**typed, "PATH": binaries, "COLUMNS": "80", "NO_COLOR": "1", "VENV": sys.prefix}
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return re.sub(r"^progress: .*\n", "", done.stdout, flags=re.MULTILINE)  # how many depends on the machine


def matches(shown: str, printed: str) -> bool:
    """Whether what is shown is what was printed; a line of ... stands for any lines."""
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    parts = re.split(r"^\.\.\.$", shown.strip("\n"), flags=re.MULTILINE)
    chunks = [[line.rstrip() for line in part.strip("\n").splitlines()] for part in parts]
    at = 0
    for number, chunk in enumerate(chunks):
        size, last = len(chunk), number == len(chunks) - 1
        starts = [at] if number == 0 else [len(lines) - size] if last and size else range(at, len(lines) + 1)
        found = next((start for start in starts if start >= at and lines[start : start + size] == chunk), None)
        if found is None:
            return False
        at = found + size
    return len(chunks) > 1 or at == len(lines)


def consoles() -> list:
    """A page's commands in their order: one reads what another wrote."""
    pages = [(page.name, re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.M | re.S)) for page in PAGES]
    return [pytest.param(shown, id=name) for name, shown in pages if shown]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", consoles())
def test_commands_print_what_is_shown(page):
    (ROOT / "out").mkdir(exist_ok=True)
    for block in page:
        first, _, shown = block.partition("\n")
        assert first.startswith("$ ")
        printed = shell(first.removeprefix("$ "))
        assert matches(shown, printed), f"{first}\n{printed}"


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block):
    subprocess.run([sys.executable, "-W", "error", "-c", block], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_that_are_named_exist(page):
    for match in PATH.finditer(page.read_text()):
        inside, linked = match.groups()
        path = ROOT / inside if inside else page.parent / linked
        assert path.exists(), match.group()


def test_the_picture_is_what_its_command_draws(tmp_path):
    shell(f"wavetrain schedule --kind wave --ranks 4 --waves 2 --microbatches 4 --svg {tmp_path}/wave.svg")
    assert (tmp_path / "wave.svg").read_text() == (ROOT / "docs/pictures/wave.svg").read_text()


def test_the_end_of_make_test_is_the_one_shown():
    """`make test` can't be run from inside itself; the last line of its recipe can be."""
    shown = re.search(r"^\$ make test\n\.\.\.\n(.*)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE)[1]
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert shell(recipe.splitlines()[-1].strip().removeprefix("@")) == f"{shown}\n"


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 50


def test_matching_knows_a_difference():
    assert matches("a\n...\nd", "a\nb\nc\nd\n")
    assert matches("...\nd", "a\nd")
    assert not matches("a\nb", "a\nc")
    assert not matches("a\n...", "b\nc")


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "CONTRIBUTING.md"])
def test_the_project_has_its_papers(name):
    assert (ROOT / name).read_text().strip()


def test_no_machine_path_or_registry_is_written_down():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    hosts = re.compile(r"(?<![\w.])/(?:work|root|farm)/\w|extra-index-url|find-links")
    for name in listed:
        path = ROOT / name
        if name != "tests/test_docs.py" and path.is_file():
            assert not hosts.search(path.read_text(errors="ignore")), name


def test_the_accuracy_page_is_what_validation_finds():
    from wavetrain.study.accuracy import accuracy_page
    from wavetrain.study.rows import price_tables
    from wavetrain.study.validate import summarize

    found = summarize(price_tables([ROOT / "validation" / "published.csv"]))
    assert (ROOT / "docs" / "accuracy.md").read_text() == accuracy_page(found), "run `make accuracy`"


def test_the_table_of_errors_in_the_readme_is_the_page():
    tables = [
        re.findall(r"^\|.*left out.*\n(?:\|.*\n)+", (ROOT / file).read_text(), re.MULTILINE)
        for file in ("README.md", "docs/left-out.md")
    ]
    assert tables[0] == tables[1]
    assert len(tables[0]) == 1
