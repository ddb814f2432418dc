"""From the options of `wavetrain plan` to a question; everything that is wrong with them at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from wavetrain.base.errors import InputError, Problem, nearest
from wavetrain.base.units import printable
from wavetrain.commands.shared import MOST_DEGREE

if TYPE_CHECKING:
    from wavetrain.cluster import Cluster
    from wavetrain.model import Model
    from wavetrain.plan import Plan
    from wavetrain.planner.question import Question

T = TypeVar("T")

UNITS: dict[str, dict[str, float]] = {
    "--tokens": {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12},
    "--deadline": {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400},
    "--headroom": {"": 1, "%": 0.01},
    "--power-cap": {"": 1, "W": 1, "kW": 1e3, "MW": 1e6},
}
EXAMPLES = {"--tokens": "1T", "--deadline": "30d", "--headroom": "10%", "--power-cap": "500kW"}
WHOLES = ("--global-batch", "--seq-len", "--tp", "--cp", "--pp", "--dp", "--microbatch", "--waves", "--chunks")
SOFTWARE = ("--attention", "--elementwise", "--precision", "--gradients", "--overlap", "--recompute")
PIN_OF = {"--zero1": "shard_optimizer"}  # where an option has another name than its pin
PINS = (
    *("--tp", "--sequence-parallel", "--cp", "--pp", "--dp", "--microbatch", "--schedule", "--waves", "--chunks"),
    *("--recompute", "--shard", "--keep", "--zero1", "--devices"),
)
STAND_IN_MODEL, STAND_IN_CLUSTER = "tiny-llama", "dgx-h100"
FLAGS = ("--sequence-parallel", "--keep", "--zero1")


def question_of(given: Mapping[str, Any]) -> Question:
    """The question that options ask."""
    from wavetrain.cluster import load_cluster
    from wavetrain.model import load_model
    from wavetrain.planner.ask import question

    problems: list[Problem] = []
    options = _quantities(given, problems) | pins_of(given, problems)
    batch = _batch(given, problems)
    length = given.get("--seq-len")
    usable = length if length is not None and 1 <= length <= MOST_DEGREE else None
    model = _or_problems(lambda: load_model(given["model"], seq_len=usable), problems)
    cluster = _or_problems(lambda: load_cluster(given["cluster"]), problems)
    software = _or_problems(lambda: _software(given, model, cluster), problems)
    options |= {"objective": given.get("--objective", "throughput"), "only": _words(given, "--only")}
    options["mixed"] = not given.get("--no-mix", False)
    if software is not None:
        options |= {"stack": software.stack, "precision": software.precision}
    # words are wrong whatever they are asked of: all of them are looked at even where the model is wrong
    of = (model or load_model(STAND_IN_MODEL), cluster or load_cluster(STAND_IN_CLUSTER))
    asked = _or_problems(lambda: question(*of, global_batch=batch, **options), problems)
    if problems or asked is None:
        raise InputError(dict.fromkeys(map(_as_option, problems)))
    return asked


def _batch(given: Mapping[str, Any], problems: list[Problem]) -> int:
    """Sequences per step; a search for the largest batch takes none."""
    batch = given.get("--global-batch")
    if given.get("--objective") == "batch":
        free = {"--global-batch": "the largest batch is what is sought", "--pp": "it has no pipeline"}
        wrong = [(name, rule) for name, rule in free.items() if given.get(name) not in (None, 1)]
        problems += [Problem(where=name, rule=f"means nothing beside --objective batch: {r}") for name, r in wrong]
        return 1
    if batch is None:
        problems.append(Problem(where="--global-batch", rule="missing: how many sequences a step has"))
    return batch if batch is not None and 1 <= batch <= MOST_DEGREE else 1


def pins_of(given: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Pins by their names, and what of them is wrong."""
    from wavetrain.plan import Recompute
    from wavetrain.plan.request import SHARD_WORDS
    from wavetrain.planner.question import KINDS

    for option in (*WHOLES, "--devices"):
        value = given.get(option)
        if value is not None and not 1 <= value <= MOST_DEGREE:
            problems.append(Problem(where=option, rule=f"{value}: must be from 1 to {MOST_DEGREE:,}"))
    made = {PIN_OF.get(name, name[2:].replace("-", "_")): given[name] for name in PINS if name in given}
    for option, legal in (("schedule", KINDS), ("recompute", tuple(Recompute))):
        if option in made and made[option] not in legal:
            problems.append(_unknown(f"--{option}", made.pop(option), tuple(map(str, legal))))
    if "recompute" in made:
        made["recompute"] = Recompute(made["recompute"])
    if "shard" in made and made["shard"] not in SHARD_WORDS:
        text = made.pop("shard")
        if re.fullmatch(r"[1-9]\d{0,6}", text):
            made["shard"] = int(text)
        else:
            rule = f"{printable(text)}: must be a number of replicas, or a word"
            problems.append(Problem(where="--shard", rule=rule, legal=("1", "2", "4", "...", *SHARD_WORDS)))
    return made


def pins_of_text(text: str) -> dict[str, Any]:
    """Pins from words such as tp=8,pp=1."""
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = word.partition("=")
        option = f"--{name.strip().replace('_', '-')}"
        if option not in PINS:
            legal = tuple(pin[2:] for pin in PINS)
            rule = f"{printable(word)}: no such part of a plan"
            problems.append(Problem(where="--instead", rule=rule, legal=legal, nearest=nearest(name.strip(), legal)))
        else:
            given[option] = _pin_value(option, value.strip(), problems)
    if not given and not problems:
        problems.append(Problem(where="--instead", rule="must name parts of a plan, like tp=8,pp=1"))
    made = pins_of({name: value for name, value in given.items() if value is not None}, problems)
    if problems:
        raise InputError(problems)
    return made


def _pin_value(option: str, text: str, problems: list[Problem]) -> Any:
    """A value as the option itself would have it; None, and a problem, where it can't be."""
    if option in FLAGS:
        known = {"yes": True, "true": True, "1": True, "": True, "no": False, "false": False, "0": False}
        if text not in known:
            problems.append(Problem(where="--instead", rule=f"{option[2:]}={printable(text)}: must be yes or no"))
        return known.get(text)
    if option in WHOLES or option == "--devices":
        if not re.fullmatch(r"\d{1,9}", text):
            problems.append(Problem(where="--instead", rule=f"{option[2:]}={printable(text)}: must be a whole number"))
            return None
        return int(text)
    return text


def _quantities(given: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Tokens, durations, shares and watts, as people write them."""
    names = {"--tokens": "tokens", "--deadline": "deadline_s", "--headroom": "headroom", "--power-cap": "power_w"}
    made = {}
    for option, name in names.items():
        if option in given:
            made[name] = quantity(option, given[option], problems)
    if "--deadline" in given and "--tokens" not in given:
        problems.append(Problem(where="--deadline", rule="for how many tokens?", remedy="--tokens 1T beside it"))
    if not 0 <= made.get("headroom", 0.0) < 1:
        rule = f"{printable(given['--headroom'])}: must be a share from 0 to 1"
        problems.append(Problem(where="--headroom", rule=rule))
        made["headroom"] = 0.0
    return made


def quantity(option: str, text: str, problems: list[Problem]) -> float:
    """A number with a unit of the option's own; 0 and a problem where it is none."""
    units = UNITS[option]
    by_word = {word.lower(): factor for word, factor in units.items()} if option != "--power-cap" else units
    matched = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?(?:e\d{1,2})?)\s*([A-Za-z%]*)", text.strip())
    unit = matched[2] if matched and option == "--power-cap" else matched[2].lower() if matched else ""
    if matched is None or unit not in by_word or not (option == "--headroom" or float(matched[1]) > 0):
        legal = ", ".join(word for word in units if word)
        rule = f"{printable(text)}: must be a positive number, plain or with {legal}, like {EXAMPLES[option]}"
        problems.append(Problem(where=option, rule=rule))
        return 0.0
    return float(matched[1]) * by_word[unit]


def seconds_of(option: str, value: float | None) -> float | None:
    """A time limit that is one."""
    if value is not None and not 0 < value <= 1e7:
        raise InputError(Problem(where=option, rule=f"{value:g}: must be a number of seconds above 0"))
    return value


def _software(given: Mapping[str, Any], model: Model | None, cluster: Cluster | None) -> Plan:
    """Stack and precision, read and checked as `simulate` does, in a plan of one device."""
    from wavetrain.cluster import load_cluster
    from wavetrain.model import load_model
    from wavetrain.plan import Request, plan_of
    from wavetrain.planner.question import precision_for

    model, cluster = model or load_model(STAND_IN_MODEL), cluster or load_cluster(STAND_IN_CLUSTER)
    if not cluster.groups or not cluster.is_uniform:
        cluster = load_cluster(STAND_IN_CLUSTER)  # that a plan is for equal nodes is said by the question
    stated = {name[2:]: given[name] for name in SOFTWARE if name in given and name != "--recompute"}
    stated.setdefault("precision", str(precision_for(cluster.device).products))
    stated["overlap"] = _words(given, "--overlap") or None
    return plan_of(Request(model=model, cluster=cluster.part(1), global_batch=1, **stated))


def _words(given: Mapping[str, Any], option: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in given[option].split(",")) if option in given else ()


def _or_problems(made: Callable[[], T], problems: list[Problem]) -> T | None:
    """A value, or what is wrong with it among the other problems."""
    try:
        return made()
    except InputError as error:
        problems += error.problems
        return None


def _unknown(option: str, value: str, legal: tuple[str, ...]) -> Problem:
    words = tuple(map(str, legal))
    return Problem(
        where=option, rule=f"unknown value {printable(value)}", legal=words, nearest=nearest(str(value), words)
    )


def _as_option(problem: Problem) -> Problem:
    """A problem of a question under the option that said it."""
    renamed = {"objective": "--objective", "only": "--only", "global_batch": "--global-batch", "headroom": "--headroom"}
    return replace(problem, where=renamed.get(problem.where, problem.where))
