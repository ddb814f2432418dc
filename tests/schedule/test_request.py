"""`wavetrain schedule` from the outside."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from wavetrain.schedule import SCHEDULES


def document(run, *arguments):
    ran = run("schedule", *arguments, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


@pytest.mark.parametrize("kind", [*(name for name in SCHEDULES), "derived"])
def test_every_kind_answers(run, kind):
    found = document(run, "--kind", kind, "--ranks", "4", "--microbatches", "6")
    assert found["valid"] is True
    assert found["lower_bound"] <= found["makespan"]
    assert len(found["peak_in_flight"]) == len(found["bubble"]) == 4
    assert found["peak_in_flight_max"] == max(found["peak_in_flight"])
    assert found["num_messages"] == sum(found["messages"].values())
    assert 0 <= found["bubble_fraction"] < 1


def test_the_numbers_are_the_papers(run):
    found = document(run, "--kind", "wave", "--ranks", "8", "--waves", "2", "--microbatches", "8")
    assert (found["makespan"], found["bubble_exact"], found["peak_in_flight_max"]) == (124, "7/31", 8)
    found = document(run, "--kind", "wave", "--ranks", "4", "--microbatches", "4", "--f", "1", "--b", "1")
    assert found["makespan"] == 2 * 4 * 2 + 2 * 3
    times = ["--f", "1", "--i", "1.4", "--w", "0.6"]
    found = document(run, "--kind", "wave-zb", "--ranks", "8", "--waves", "2", "--microbatches", "32", *times)
    assert found["bubble_fraction"] <= 0.025
    assert found["peak_in_flight_max"] <= 8


def test_derived_obeys_the_cap_and_a_full_backward(run):
    arguments = ["--kind", "derived", "--ranks", "4", "--chunks", "2", "--microbatches", "4", "--b", "2"]
    found = document(run, *arguments, "--memory-cap", "4")
    assert (found["makespan"], found["split_backward"]) == (33, False)
    assert found["peak_in_flight_max"] <= 4


def test_files_are_written_read_and_proven(run, tmp_path):
    text, svg = tmp_path / "s.csv", tmp_path / "s.svg"
    made = document(run, "--kind", "wave", "--waves", "2", "--text", str(text), "--svg", str(svg), "--transfer", "0.25")
    read = document(run, "--verify", str(text), "--transfer", "0.25")
    assert {key: made[key] for key in made if key != "kind"} == {key: read[key] for key in read if key != "kind"}
    root = ElementTree.parse(svg).getroot()
    bars = [item for item in root.iter() if item.tag.endswith("}g")]
    assert len(bars) == made["num_actions"]
    assert "SEND_F" in text.read_text()


def test_people_see_a_grid(run):
    ran = run("schedule", "--kind", "1f1b", "--ranks", "4", "--microbatches", "4")
    assert ran.code == 0
    assert "rank 0   F0F1F2F3............B0--..B1--..B2--..B3--" in ran.out
    assert "no deadlock at channel capacity 0, 1, unbounded" in " ".join(ran.out.split())
    assert "--svg draws all" in run("schedule", "--kind", "wave", "--waves", "4").out


def test_a_rejected_file_ends_with_5_and_the_culprit(run, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    ran = run("schedule", "--verify", str(path))
    assert ran.code == 5
    assert "rank 0 position 1: 0B0 needs 1B0" in ran.err
    ran = run("schedule", "--verify", str(path), "--json")
    assert ran.code == 5
    rejected = json.loads(ran.out)
    assert rejected["valid"] is False
    assert rejected["kind"] == "bad.csv"
    assert rejected["makespan"] is None


def test_a_forward_only_file_has_a_bound_below_it(run, tmp_path):
    found = document(run, "--kind", "forward-only")
    assert found["lower_bound"] <= found["makespan"]
    path = tmp_path / "sharded.csv"
    path.write_text("0UNSHARD,0F0,0B0,0RESHARD\n1F0,1B0\n")
    out = tmp_path / "out.csv"
    assert document(run, "--verify", str(path), "--text", str(out))["valid"]
    assert document(run, "--verify", str(out))["valid"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kind", "wav"], "nearest: wave"),
        (["--kind", "chimera", "--ranks", "5"], "nearest: 4 or 6"),
        (["--kind", "gpipe", "--waves", "2"], "possible: wave, wave-zb"),
        (["--kind", "wave", "--chunks", "2"], "possible: interleaved"),
        (["--kind", "derived", "--waves", "2", "--chunks", "2"], "one or the other"),
        (["--ranks", "0"], "from 1 to"),
        (["--microbatches", "-1"], "from 1 to"),
        (["--waves", "0"], "from 1 to"),
        (["--ranks", "65536", "--microbatches", "65536"], "can be drawn up"),
        (["--f", "zero"], "--f"),
        (["--f", "0"], "--f"),
        (["--f", "nan"], "--f"),
        (["--f", "1/0"], "--f"),
        (["--i", "-1"], "--i"),
        (["--transfer", "1e99"], "--transfer"),
        (["--b", "2", "--i", "1"], "the sum or the parts"),
        (["--memory-cap", "x"], "--memory-cap"),
        (["--kind", "derived", "--memory-cap", "0.5"], "too small"),
        (["--verify", "nowhere.csv"], "No such file"),
        (["--verify", "examples/hanging.csv", "--ranks", "7"], "means nothing beside --verify"),
        (["--f", "1e-99999999999"], "--f"),
        (["--svg", "nowhere/at/all.svg"], "can't be written"),
        (["--ranks", "64", "--microbatches", "256", "--svg", "x.svg"], "too many for a chart"),
    ],
)
def test_bad_requests_end_with_2(run, arguments, says):
    ran = run("schedule", *arguments)
    assert ran.code == 2
    assert says in ran.err
    assert "Traceback" not in ran.err


def test_a_fixed_schedule_over_the_cap_is_rejected(run):
    ran = run("schedule", "--kind", "gpipe", "--memory-cap", "2")
    assert ran.code == 5
    assert "over the cap of 2 microbatches" in ran.err


def test_no_torch_is_imported():
    program = "import sys; from wavetrain.cli import main; main(['schedule']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True)
