"""What starting costs, beside a bare interpreter in the same run: `import wavetrain`, `--help`, one description."""

import statistics
import subprocess
import sys
import time

REPEATS = 15
CASES = {
    "python -c pass": ["-c", "pass"],
    "import wavetrain": ["-c", "import wavetrain"],
    "wavetrain --help": ["-m", "wavetrain", "--help"],
    "wavetrain describe llama3-405b": ["-m", "wavetrain", "describe", "llama3-405b", "--json"],
    "wavetrain describe dgx-h100:2048": ["-m", "wavetrain", "describe", "dgx-h100:2048", "--json"],
}


def measure() -> dict[str, float]:
    """Median seconds of each case, repetitions interleaved."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(REPEATS):
        for name, arguments in CASES.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    medians = measure()
    bare = medians["python -c pass"]
    for name, seconds in medians.items():
        print(f"{name:34s} {seconds * 1000:7.0f} ms   {seconds / bare:5.1f} x bare python")
