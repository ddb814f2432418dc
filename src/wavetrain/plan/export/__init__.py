"""Plans in the words of other programs. A target is one function in `EXPORTERS`."""

from __future__ import annotations

from collections.abc import Callable

from wavetrain.base.errors import InputError, Problem, nearest
from wavetrain.plan.export.accelerate import write_accelerate
from wavetrain.plan.export.deepspeed import write_deepspeed
from wavetrain.plan.export.exported import Exported
from wavetrain.plan.export.fsdp2 import write_fsdp2
from wavetrain.plan.export.launch import write_slurm, write_torchrun
from wavetrain.plan.export.megatron import write_megatron
from wavetrain.plan.export.pipeline_csv import write_pipeline_csv
from wavetrain.plan.export.torchtitan import write_torchtitan
from wavetrain.plan.plan import Plan

__all__ = ["EXPORTERS", "Exported", "export"]

EXPORTERS: dict[str, Callable[[Plan], Exported]] = {
    "torchtitan": write_torchtitan,
    "megatron": write_megatron,
    "deepspeed": write_deepspeed,
    "accelerate": write_accelerate,
    "fsdp2": write_fsdp2,
    "pytorch-pipeline-csv": write_pipeline_csv,
    "torchrun": write_torchrun,
    "slurm": write_slurm,
}


def export(plan: Plan, target: str) -> Exported:
    """A plan for a target, by the target's name."""
    if target not in EXPORTERS:
        legal = tuple(EXPORTERS)
        rule = f"unknown target {target}"
        raise InputError(Problem(where="--to", rule=rule, legal=legal, nearest=nearest(target, legal)))
    return EXPORTERS[target](plan)
