"""Interleaved timing: every contender runs once in each round, so that what a shared machine does to one it does to all."""
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version

Laps = dict[str, list[tuple[float, float]]]


def take_turns(contenders: Mapping[str, Callable[[], object]], rounds: int = 7) -> Laps:
    """CPU and wall seconds of each contender in each round, after one round to warm up."""
    laps: Laps = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            spent = time.process_time() - cpu, time.perf_counter() - wall
            if turn: laps[name].append(spent)
    return laps


def report(title: str, laps: Laps, base: str) -> dict[str, float]:
    """Print a table, the ratios of CPU time to `base` taken round by round; returns the median ratios."""
    print(f"\n### {title}\n\n| contender | CPU ms, median | wall ms, median | CPU / `{base}`, median (least to most) |\n|---|---|---|---|")
    ratios = {}
    for name, own in laps.items():
        each = sorted(mine[0] / max(other[0], 1e-9) for mine, other in zip(own, laps[base], strict=True))
        ratios[name] = statistics.median(each)
        cpu, wall = (1000 * statistics.median(lap[i] for lap in own) for i in (0, 1))
        print(f"| {name} | {cpu:.1f} | {wall:.1f} | {ratios[name]:.2f} ({each[0]:.2f} to {each[-1]:.2f}) |")
    return ratios


def environment(*packages: str) -> None:
    """Print what was measured with."""
    versions = ", ".join(f"{p} {version(p)}" for p in packages)
    print(f"Python {platform.python_version()}, {versions}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, BLAS on one thread")
