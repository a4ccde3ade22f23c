"""Install the wheel with each extra, and the source distribution, into environments of their own, and use them.

    python .ci/packages.py [--python python3.12] [EXTRA ...]

Nothing of the checkout is on the path there, and no other extra is installed. Versions are those of constraints.txt. An
extra without a line in `USES` is an error.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")
TINY = "test_vit --random-weights"
USES: dict[str, list[str]] = {
    "": ["dtem flops --model deit_tiny_patch16_224 --r 0,16", "dtem adapters", "dtem show a.png --model digits_vit"],
    "train": [f"dtem train --model {TINY} --data photos --loss distill --epochs 1 --batch-size 2 --out run"],
    "plot": [f"dtem eval --model {TINY} --num-classes 2 --data photos --r 2,4 --plot curve.png"],
    "segmentation": ["python -c import_dtem,torchmetrics"],
    "transformers": ["dtem models --json"],
    "captioning": ["python -c import_dtem,transformers,pycocoevalcap,accelerate"],
    "demo": ["python -c import_dtem.data.digits,mlxtend,accelerate"],
    "datasets": ["python -c import_dtem,datasets"],
    "tensorboard": ["python -c import_dtem,tensorboard"],
    "wandb": ["python -c import_dtem,wandb"],
    "app": ["python -c import_dtem.app.server,gradio"],
    "export": [f"dtem export --model {TINY} --r 2 --out a.onnx"],
    "openvino": [f"dtem export --model {TINY} --r 2 --out a.xml"],
    "predict": [f"dtem predict photos --model {TINY} --r 2 --out a.parquet"],
    "ray": ["python -c import_dtem,ray.data,pyarrow"],
    "serve": ["python -c import_ray.serve,onnxruntime"],
    "notebooks": ["python -c import_dtem,nbclient,ipykernel,onnxruntime"],
    "docs": ["python -c import_mkdocs"],
    "test": ["python -c import_dtem,pytest,hypothesis"],
    "dev": ["python -c import_dtem,mypy.api"],
}
"""Commands by extra; "": none. ``import_a,b`` stands for ``import a, b``."""


def main() -> int:
    """Check what is asked for, or everything; returns the number of installations that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("extras", nargs="*")
    args = parser.parse_args()
    extras = ["", *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]]
    if missing := set(extras) - set(USES):
        sys.exit(f"no use is known of the extras {', '.join(sorted(missing))}: add a line to USES in {__file__}")
    (wheel,), (sdist,) = (list((ROOT / "dist").glob(ending)) for ending in ("*.whl", "*.tar.gz"))
    failed = []
    for extra in args.extras or extras:
        failed += check(f"{wheel}[{extra}]" if extra else str(wheel), args.python, USES[extra])
    if not args.extras:
        failed += check(str(sdist), args.python, USES[""])
    print(f"failed: {', '.join(failed)}" if failed else "all installed and used")
    return len(failed)


def check(package: str, python: str, commands: list[str]) -> list[str]:
    """Install into a new environment and run the commands there; returns the package if anything fails."""
    name = Path(package).name
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        scripts = place / "env" / ("Scripts" if os.name == "nt" else "bin")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
        install = ["pip", "install", "--quiet", "--python", str(scripts / "python")]
        steps = [
            [str(UV), "venv", "--quiet", "--python", python, str(place / "env")],
            [str(UV), *install, "-c", str(ROOT / "constraints.txt"), package],
            [str(scripts / "python"), "-c", IMAGES],
            *(split(command) for command in commands),
        ]
        for step in steps:
            done = subprocess.run(step, cwd=place, env=environment, capture_output=True, text=True)
            if done.returncode:
                print(f"FAILED {name}: {' '.join(step)[:200]}\n{(done.stdout + done.stderr)[-2000:]}")
                return [name]
    print(f"ok {name}")
    return []


def split(command: str) -> list[str]:
    """The words of a command."""
    words = command.split()
    if words[:2] == ["python", "-c"]:
        return ["python", "-c", words[2].replace("import_", "import ")]
    return words


IMAGES = """
from pathlib import Path
from PIL import Image
for label in range(2):
    Path("photos", str(label)).mkdir(parents=True)
    for number in range(3):
        Image.effect_noise((160, 160), 50 + 40 * label).convert("RGB").save(f"photos/{label}/{number}.png")
Image.effect_noise((28, 28), 50).save("a.png")
"""

if __name__ == "__main__":
    sys.exit(main())
