"""PyTorch's schedule CSV: the computing of every pipeline rank, in order; PyTorch adds the messages itself."""

from __future__ import annotations

from wavetrain.plan.export.exported import Exported
from wavetrain.plan.export.features import beyond
from wavetrain.plan.plan import Plan
from wavetrain.schedule.schedules import SCHEDULES
from wavetrain.schedule.text import write_text

EXPRESSED = ("pipeline", "schedule")


def write_pipeline_csv(plan: Plan) -> Exported:
    """For `_PipelineScheduleRuntime._load_csv` and torchtitan's `pipeline_parallel_schedule_csv`."""
    entry = SCHEDULES[plan.layout.schedule]
    notes = beyond(plan, EXPRESSED)
    chains = entry.placement(plan.shape).chains
    if chains > 1:
        notes = (f"that stages are {chains} copies of the model, each of which runs its own microbatches", *notes)
    return Exported("pytorch-pipeline-csv", write_text(entry.order(plan.shape)), "schedule.csv", notes)
