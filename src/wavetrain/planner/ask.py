"""`search` as people call it: names and numbers in, the answer out; what is not said is free."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from wavetrain.base.errors import InputError, Problem, nearest
from wavetrain.base.units import DType
from wavetrain.cluster.cluster import Cluster
from wavetrain.model.model import Model
from wavetrain.plan.stack import Precision, stack_with
from wavetrain.planner.progress import Watch, to_log
from wavetrain.planner.question import FAMILIES, Objective, Pins, Question, precision_for
from wavetrain.planner.search import Answer
from wavetrain.planner.search import search as answer_to


def search(
    model: Model,
    cluster: Cluster,
    *,
    global_batch: int,
    timeout_s: float | None = None,
    watch: Watch = to_log,
    **options: Any,
) -> Answer:
    """The best plan for a model on a cluster.

    Options are those of `Question` (objective, only, headroom, seq_len ...) and, to fix a part of the plan, of `Pins`
    (tp, pp, waves ...). `watch` is told where the search stands, ten times a second at most.
    """
    asked = question(model, cluster, global_batch=global_batch, **options)
    return answer_to(asked, time_limit_s=timeout_s, watch=watch)


def question(model: Model, cluster: Cluster, *, global_batch: int, **options: Any) -> Question:
    """A question in values; every option that there is not, or that can't be, at once."""
    pins = {item.name for item in fields(Pins)}
    own = {item.name for item in fields(Question)} - {"model", "cluster", "global_batch", "pins"}
    problems = [_unknown(name, pins | own) for name in options if name not in pins | own]
    if "objective" in options and options["objective"] not in tuple(Objective):
        problems.append(_word("objective", options["objective"], tuple(Objective)))
    problems += [_word("only", name, tuple(FAMILIES)) for name in options.get("only", ()) if name not in FAMILIES]
    if not 1 <= global_batch <= 2**31:
        problems.append(Problem(where="global_batch", rule=f"{global_batch}: must be from 1 to {2**31:,}"))
    if not cluster.groups or not cluster.is_uniform:
        rule = f"{cluster.name} has {cluster.num_kinds} kinds of nodes; a plan is for equal ones"
        problems.append(Problem(where="cluster", rule=rule, remedy="a plan for one group of nodes"))
    if not 0.0 <= options.get("headroom", 0.0) < 1.0:
        problems.append(Problem(where="headroom", rule=f"{options['headroom']}: must be a share from 0 to 1"))
    if problems:
        raise InputError(problems)
    stated = {name: value for name, value in options.items() if name in own}
    stated["objective"] = Objective(stated.get("objective", Objective.THROUGHPUT))
    stated.setdefault("seq_len", model.seq_len)
    stated.setdefault("stack", stack_with(cluster.overlap))
    stated.setdefault("precision", precision_for(cluster.device))
    if isinstance(stated["precision"], str):
        stated["precision"] = _precision(stated["precision"])
    made = Question(model=model, cluster=cluster, global_batch=global_batch, **stated)
    return replace(made, pins=Pins(**{name: value for name, value in options.items() if name in pins}))


def _precision(word: str) -> Precision:
    """A format by its name, as the command line has it; products alone are in fp8."""
    words = tuple(dtype.value for dtype in (DType.BF16, DType.FP16, DType.FP32, DType.FP8))
    if word not in words:
        raise InputError(_word("precision", word, words))
    return Precision(compute=DType.BF16 if word == "fp8" else DType(word), products=DType(word))


def _unknown(name: str, legal: set[str]) -> Problem:
    return Problem(where=name, rule="no such option", nearest=nearest(name, sorted(legal)))


def _word(where: str, value: str, legal: tuple[str, ...]) -> Problem:
    words = tuple(map(str, legal))
    return Problem(where=where, rule=f"unknown value {value}", legal=words, nearest=nearest(str(value), words))
