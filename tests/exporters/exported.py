"""Exports tiny patched models, runs the files, and prints what happened as JSON. Run as a script by `test_export.py`:
in a process of its own no import hook checks shapes, which would stand between torch.export and the code."""

import dataclasses
import importlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from timm.models.eva import Eva

sys.path.insert(0, str(Path(__file__).parents[1]))
from contract.hosts import R, ask, fresh, images, patch
from dtem import integrations
from dtem.data.labels import num_classes
from dtem.exporters import onnx, openvino, program
from dtem.exporters.export import FORMATS, export


def metadata(form: str, path: Path) -> dict[str, str]:
    """What a file says of itself, read by its own runtime."""
    if form == "onnx":
        return {entry.key: entry.value for entry in importlib.import_module("onnx").load(path).metadata_props}
    if form == "openvino":
        info = importlib.import_module("openvino").Core().read_model(path).get_rt_info(["dtem"])
        return {key: str(value.astype(str)) for key, value in info.astype(dict).items()}
    entries = {program.METADATA: ""}
    torch.export.load(path, extra_files=entries)
    return json.loads(entries[program.METADATA])


def shallow(model: torch.nn.Module) -> torch.nn.Module:
    """The model with its first two blocks."""
    if hasattr(model, "blocks"):
        model.blocks = model.blocks[:2]
        if isinstance(model, Eva) and model.rope_mixed:  # frequencies of every block
            model.rope.freqs, model.rope.depth = torch.nn.Parameter(model.rope.freqs[:, :2].detach()), 2
        return model
    layout = integrations.find(model).merged[type(model)].layout
    encoder = model.get_submodule(layout.encoder)
    encoder.config.num_hidden_layers = 2
    encoder.set_submodule(layout.layers, encoder.get_submodule(layout.layers)[:2])
    return model


def exported(form: str, name: str, method: str, folder: str) -> dict:
    """Differences from PyTorch at batches that the trace never saw, and what the file says of itself."""
    model = shallow(fresh(name))
    handle = patch(model, method, R)
    path = Path(folder, f"{name}-{method}{FORMATS[form]}")
    labels = [f"class {number}" for number in range(num_classes(model))] or None
    written = export(handle, path, data=[images(name, 3)], labels=labels)
    run = {"onnx": onnx.runner, "openvino": openvino.runner, "torch": program.runner}[form](path)
    differences = {}
    with torch.no_grad():
        for batch in (1, 2, 7):
            x = images(name, batch, seed=batch)
            differences[str(batch)] = float((run(x) - ask(model, x)).abs().max())
        flat = torch.zeros(2, *handle.host.image)  # every patch alike: ties everywhere
        differences["ties"] = float((run(flat) - ask(model, flat)).abs().max())
    quantised = folded = None
    if form == "onnx" and name == "distilled":
        norms = [n for n in importlib.import_module("onnx").load(path).graph.node if n.op_type == "LayerNormalization"]
        folded = sum(norm.input[1] == norm.input[2] for norm in norms)
        small = export(handle, path.with_suffix(".int8.onnx"), data=[images(name, 3)], int8=True)
        found, expected = onnx.runner(small.files[0])(flat), run(flat)
        quantised = float((found - expected).abs().max() / expected.abs().max())
    return {
        "differences": differences,
        "quantised": quantised,
        "folded": folded,
        "metadata": metadata(form, path),
        "operators": written.operators,
        "agreement": dataclasses.asdict(written.agreement),
        "files": sorted(p.name for p in written.files),
    }


def main() -> None:
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in sys.argv[1:]:
            try:
                report[case] = exported(*case.split("-"), folder)
            except Exception as error:
                report[case] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
