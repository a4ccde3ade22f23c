"""Run the speed benchmarks and write their records to benchmarks/results: about half an hour on two cores.

python -m benchmarks.run
"""

import argparse
import runpy
import sys

NAMES = ("grouping", "attention", "projection", "operations", "speed", "export_speed")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name in NAMES:
        print(f"== {name}", flush=True)
        sys.argv = [f"benchmarks/{name}.py"]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    print("== long inputs", flush=True)
    sys.argv = ["benchmarks/speed.py", "--long"]
    runpy.run_module("benchmarks.speed", run_name="__main__")


if __name__ == "__main__":
    main()
