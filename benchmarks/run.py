"""Run the speed benchmarks and write their records to benchmarks/results: about an hour on two cores.

python -m benchmarks.run
python -m benchmarks.run long_inputs operations        only these
"""

import argparse
import runpy
import sys

NAMES = {
    name: (name,) for name in ("grouping", "attention", "projection", "operations", "speed", "export_speed", "engines")
}
NAMES["long_inputs"] = ("speed", "--long")
"""Scripts and their options, by record."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default all: {', '.join(NAMES)}")
    names = parser.parse_args().names or list(NAMES)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"{', '.join(unknown)} is not one of: {', '.join(NAMES)}")
    for name in names:
        script, *options = NAMES[name]
        print(f"== {name}", flush=True)
        sys.argv = [f"benchmarks/{script}.py", *options]
        runpy.run_module(f"benchmarks.{script}", run_name="__main__")


if __name__ == "__main__":
    main()
