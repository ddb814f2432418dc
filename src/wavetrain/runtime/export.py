"""A trained model as transformers reads it: safetensors under the model's own names, one file per rank of a pipeline.

Values are those that are learnt (fp32, whatever the format of arithmetic). A parameter that has another one's values is
not written, as transformers does it. What a run needs to go on (optimizer, data) is not here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from wavetrain.base.errors import RunError
from wavetrain.runtime.beside import PATIENCE_S
from wavetrain.runtime.exported import INDEX, SINGLE
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.world import World


def save_model(learner: Learner, world: World, directory: Path, *, config: Path | None = None) -> list[str]:
    """Write the whole model; all ranks call this together. The names of the files, on every rank."""
    grid, ties = learner.grid, learner.ties
    writes = grid.replica == 0 and grid.part == 0
    name = SINGLE if grid.layout.pp == 1 else f"model-{grid.stage_rank + 1:05d}-of-{grid.layout.pp:05d}.safetensors"
    tensors: dict[str, Tensor] = {}
    for composed in learner.stages.values():
        whole = composed.whole_parameters()  # a part of it is on every replica and part
        if writes and composed.number < learner.depth:  # of two copies of a model the first
            tensors |= {key: value.contiguous() for key, value in whole.items() if key not in ties}
    if writes:
        with _writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            save_file(tensors, directory / f".{name}", metadata={"format": "pt"})
            (directory / f".{name}").replace(directory / name)
        sizes = sum(tensor.nbytes for tensor in tensors.values())
        world.store.set(f"saved/{grid.stage_rank}", json.dumps([name, sorted(tensors), sizes]))
    keys = [f"saved/{rank}" for rank in range(grid.layout.pp)]
    world.store.wait(keys, timedelta(seconds=PATIENCE_S))
    saved = [json.loads(world.store.get(key)) for key in keys]
    if world.rank == 0:
        with _writing(directory):
            if len(saved) > 1:
                weights = {key: file for file, keys, _ in saved for key in keys}
                index = {"metadata": {"total_size": sum(size for *_, size in saved)}, "weight_map": weights}
                (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            if config is not None:
                shutil.copyfile(config, directory / "config.json")
    dist.barrier()
    return [file for file, *_ in saved]


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """A full disk or a folder without rights is the user's to know."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{directory}: can't be written: {error.strerror or error}") from None
