"""The package as a whole: its public names, what importing it costs, its layers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import wavetrain

PUBLIC = """
Cluster Device InputError Model Plan Timeline WavetrainError Work __version__ load_cluster load_model
parallelize search simulate trace
""".split()

HEAVY = ("torch", "transformers", "pandas", "numpy", "safetensors")


def test_public_names_are_frozen():
    assert wavetrain.__all__ == PUBLIC
    assert sorted(dir(wavetrain)) == sorted(PUBLIC)


def test_every_public_name_loads():
    for name in PUBLIC:
        assert getattr(wavetrain, name) is not None


def test_names_stay_what_they_are_whatever_is_imported():
    """A folder of the same name would take a function's place as soon as anybody imports it."""
    folders = {path.stem for path in Path(wavetrain.__file__).parent.iterdir()}
    assert not folders & set(PUBLIC)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = wavetrain.nonsense


@pytest.mark.parametrize(
    "program",
    [
        "import wavetrain",
        "from wavetrain.cli import main; main(['--help'])",
        "from wavetrain.cli import main; assert main(['describe', 'llama2-7b']) == 0",
        "from wavetrain.cli import main; assert main(['describe', 'dgx-h100:4', '--json']) == 0",
    ],
)
def test_nothing_heavy_is_imported(program):
    report = f"import json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]), file=sys.stderr)"
    command = [sys.executable, "-W", "error", "-c", f"{program}\n{report}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stderr.splitlines()[-1]) == []


def test_python_dash_m_runs_the_command_line():
    done = subprocess.run([sys.executable, "-m", "wavetrain", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"wavetrain {wavetrain.__version__}\n"
