"""Answers on disk: one line per point, written when it is known, so that a study that was killed goes on from there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from wavetrain.base.errors import InputError, Problem, RunError
from wavetrain.study.scaling.record import Record, record_of
from wavetrain.study.scaling.solve import Solved

LINES = "records.jsonl"
PLANS = "plans"


@dataclass
class Store:
    """The answers in a folder; open while its lines are locked."""

    folder: Path
    stream: IO[str]
    known: dict[str, Record] = field(default_factory=dict)

    def keep(self, solved: Solved) -> None:
        """Note an answer; on disk only if another run could not find more."""
        self.known[solved.key] = solved.record
        if not solved.is_final:
            return
        try:
            self._write(solved)
        except OSError as error:
            words = f"an answer can't be kept: {error.strerror or error}"
            raise RunError(f"{self.folder}: {words}; run again to continue") from None

    def _write(self, solved: Solved) -> None:
        """The plan first: a line that is there is whole, and so is the file it names."""
        if solved.plan:
            path = self.folder / solved.record.plan_file
            begun = path.with_suffix(".part")
            begun.write_text(solved.plan, encoding="utf-8")
            begun.replace(path)
        line = json.dumps({"key": solved.key, "record": solved.record.as_json()}, allow_nan=False)
        self.stream.write(f"{line}\n")
        self.stream.flush()
        os.fsync(self.stream.fileno())


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    """The store of a folder, which is made where it is missing; one study at a time."""
    try:
        (folder / PLANS).mkdir(parents=True, exist_ok=True)
        stream = (folder / LINES).open("a+", encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(Problem(where=str(folder), rule=f"can't be written: {reason}")) from None
    try:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            rule = "another study is writing there"
            raise InputError(Problem(where=str(folder), rule=rule, remedy="another folder with -o")) from None
        store = Store(folder, stream)
        stream.seek(0)
        text = stream.read()
        store.known.update(_records(text, folder))
        if text and not text.endswith("\n"):  # a line that a kill cut short
            stream.write("\n")
        yield store
    finally:
        with suppress(OSError):  # that something could not be written was said when it was tried
            stream.close()


def _records(text: str, folder: Path) -> Iterator[tuple[str, Record]]:
    """Lines that are whole, with the plan they name; any other point is computed again."""
    for line in text.splitlines():
        try:
            data = json.loads(line)
            key, record = str(data["key"]), record_of(data["record"])
        except (ValueError, KeyError, TypeError):
            continue
        if not record.plan_file or (folder / record.plan_file).is_file():
            yield key, record
