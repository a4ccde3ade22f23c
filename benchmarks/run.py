"""Run every benchmark and keep its record in benchmarks/results. Takes about half an hour on two cores."""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent

if __name__ == "__main__":
    for name in ("grouping", "attention", "projection", "operations", "speed", "export_speed"):
        print(f"== {name}", flush=True)
        sys.argv = [f"benchmarks/{name}.py"]
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
