"""Choose the memory constants of software on runs that fitted, ran out of memory, or reported their peak.

    python validation/fit_memory.py TABLE.csv...

What it uses: rows of the tables with status ok or OOM in tables that have both, and rows with `peak_mem_gb`. It tries a
grid around values measured elsewhere (24 bytes per logit; 10 % fragmentation) and prints the share of runs rightly said
to fit for the best, with the mean error of peak memory, which hardly depends on them. It writes nothing: the values in
`cluster/laws.yaml` are the best of such a run on 517 layouts of Aleph Alpha, rounded.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from wavetrain.cluster.laws import Laws, load_laws
from wavetrain.plan.plan import Plan
from wavetrain.sim.batch import Batch
from wavetrain.sim.gather import gather_all
from wavetrain.sim.memory import memory
from wavetrain.study.rows import Inexpressible, plan_of, read_rows

GRID = {
    "fragmentation": (0.05, 0.08, 0.1, 0.12),
    "eager_logit_bytes": (20.0, 24.0, 28.0),
    "eager_norm_bytes": (3.0, 6.0, 9.0),
    "eager_activation_bytes": (0.0, 3.0, 6.0),
    "reserve_bytes": (0.7e9, 1.5e9, 3e9),
}
SHOWN = 8
Groups = list[tuple[Batch, list[int]]]


def load(paths: list[Path]) -> tuple[Groups, np.ndarray, np.ndarray]:
    """Rows grouped for pricing; whether each ran out of memory; its reported peak, or nan."""
    plans: list[Plan] = []
    out, peaks = [], []
    for path in paths:
        rows = [row for row in read_rows(path) if row.text("status").lower() in ("ok", "oom")]
        some = any(row.text("status").lower() == "oom" for row in rows)
        for row in rows:
            peak = row.number("peak_mem_gb")
            if not some and peak is None:
                continue
            try:
                plan, _ = plan_of(row)
            except Inexpressible:
                continue
            plans.append(plan)
            out.append(row.text("status").lower() == "oom" if some else np.nan)
            peaks.append(np.nan if peak is None else peak * 1e9)
    return gather_all(plans), np.array(out, dtype=float), np.array(peaks)


def score(groups: Groups, out: np.ndarray, peaks: np.ndarray, laws: Laws) -> tuple[float, float]:
    """Share of runs rightly said to fit or not, and the mean error of peak memory, percent."""
    right, error = [], []
    for batch, numbers in groups:
        held = memory(batch, laws)
        fails = held.peak_bytes + held.reserve_bytes > batch.device.memory_bytes
        known = ~np.isnan(out[numbers])
        right += list(fails[known] == (out[numbers][known] > 0))
        told = ~np.isnan(peaks[numbers])
        error += list(np.abs(held.peak_bytes[told] / peaks[numbers][told] - 1))
    return 100 * float(np.mean(right)) if right else np.nan, 100 * float(np.mean(error)) if error else np.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    groups, out, peaks = load(parser.parse_args().tables)
    laws = load_laws()
    print(f"{int(np.sum(~np.isnan(out)))} runs that fitted or not, {int(np.sum(~np.isnan(peaks)))} with a peak")
    right, error = score(groups, out, peaks, laws)
    print(f"as shipped: right {right:.1f} %, error of the peak {error:.1f} %")
    tried = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    found = [(score(groups, out, peaks, replace(laws, **values)), values) for values in tried]
    for (right, error), values in sorted(found, key=lambda item: -np.nan_to_num(item[0][0]))[:SHOWN]:
        print(f"right {right:.1f} %, error of the peak {error:.1f} %: {values}")


if __name__ == "__main__":
    main()
