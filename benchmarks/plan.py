"""How long the search takes, from 64 to 65,536 devices, and how little of the space it simulates.

    python benchmarks/plan.py

Every case is the full space with nothing pinned, to gap 0. Seconds are this machine's; beside them the layouts of the
space and how many of them were simulated.
"""

from __future__ import annotations

import wavetrain as wt
from wavetrain.planner.search import Answer

CASES = (
    ("llama2-7b", "dgx-h100:8", 512, 1.0),
    ("llama2-70b", "dgx-h100:128", 1024, 5.0),
    ("llama3-405b", "dgx-h100:2048", 2048, 15.0),
    ("megatron-1t", "dgx-h100:8192", 4096, 30.0),
)


def line(model: str, target_s: float, answer: Answer) -> str:
    layout = answer.best.layout if answer.best else None
    assert layout is not None
    degrees = f"tp {layout.tp} cp {layout.cp} pp {layout.pp} dp {layout.dp} {layout.schedule}"
    return (
        f"{model:12} {layout.num_devices:7,} devices  {answer.search_s:6.2f} s (target {target_s:g} s)  "
        f"{answer.space:14,} layouts, {answer.evaluated:4} simulated, gap {answer.gap:g}  {degrees}"
    )


def main() -> None:
    for model, cluster, batch, target_s in CASES:
        answer = wt.search(wt.load_model(model), wt.load_cluster(cluster), global_batch=batch)
        print(line(model, target_s, answer), flush=True)


if __name__ == "__main__":
    main()
