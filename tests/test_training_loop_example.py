"""examples/own_training_loop.py runs as it is, and its adapter differs from an untrained one."""

import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

import dtem

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_training_loop.py"


def test_it_trains_saves_and_reloads(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "3"], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2", "step 3", "my.safetensors"]
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines[:3]]
    assert losses[2] < losses[0]
    model = dtem.create_model("digits_vit")
    dtem.patch(model, "dtem", r=48).save_pretrained(tmp_path / "untrained.safetensors")
    trained, untrained = (load_file(tmp_path / f"{name}.safetensors") for name in ("my", "untrained"))
    assert trained.keys() == untrained.keys()
    assert any((trained[name] != untrained[name]).any() for name in trained)
