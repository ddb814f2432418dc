"""Small plans that run on this machine."""

import tempfile
from pathlib import Path

from wavetrain.cluster import load_cluster
from wavetrain.model import load_model
from wavetrain.plan import Plan, Request, plan_of


def small_model(*, blocks=8, family="gpt", hidden=32, heads=4, vocab=61, seq_len=16, tied=False, **more):
    text = (
        f"family: {family}\nlayers: {blocks}\nhidden: {hidden}\nheads: {heads}\nffn: {2 * hidden}\nvocab: {vocab}\n"
        f"seq_len: {seq_len}\ntied: {str(tied).lower()}\n"
    )
    text += "".join(f"{key}: {value}\n" for key, value in more.items())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.yaml"
        file.write_text(text)
        return load_model(str(file))


def small_plan(*, pp=2, schedule="wave", waves=None, chunks=None, microbatches=4, recompute="none", **model) -> Plan:
    """A pipeline, and nothing but a pipeline."""
    return plan_of(
        Request(
            model=small_model(**model),
            cluster=load_cluster("dgx-h100:1").part(pp),
            global_batch=microbatches,
            pp=pp,
            dp=1,
            schedule=schedule,
            waves=waves,
            chunks=chunks,
            recompute=recompute,
            precision="fp32",
        )
    )
