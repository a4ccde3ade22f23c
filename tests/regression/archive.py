"""Archive an adapter, its logits and an exported file, as the installed version of dtem writes them.

    PYTHONPATH=src:tests python tests/regression/archive.py NAME [--folder]

Done once for each release that changes the format of adapters; the files are never written again. See
`test_adapter_files.py` for what they hold. `--folder`: the adapter as a folder, as the Hub has it.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

import dtem
from contract.hosts import HOSTS

FOLDER = Path(__file__).parent
RATES = ("0", "9", "25%")


def main() -> None:
    """Write NAME.safetensors, NAME.adapter.safetensors (or the folder NAME.adapter) and NAME.onnx."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--folder", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = HOSTS["distilled"].build().eval()
    reference = {f"host.{name}": part.clone() for name, part in model.state_dict().items()}
    handle = dtem.patch(model, r=RATES[1], norms=True, biases=True)
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    handle.save_pretrained(FOLDER / f"{args.name}.adapter{'' if args.folder else '.safetensors'}", trained_r=RATES[1])
    images = torch.randn(2, *handle.host.image)
    reference["images"] = images
    for rate in RATES:
        with torch.no_grad(), handle.at(r=rate):
            reference[f"logits.{rate}"] = model(images).clone()
    save_file(reference, FOLDER / f"{args.name}.safetensors")
    dtem.export(handle, FOLDER / f"{args.name}.onnx", data=[images])


if __name__ == "__main__":
    main()
