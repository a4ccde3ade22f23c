"""Patched models as files for other runtimes, with a fixed r.

    program.py     torch.export with a dynamic batch; the .pt2 file
    operators.py   how the operators that matter are written in ONNX
    merging.py     one merge, of few of them
    folding.py     biases as parts of weights
    onnx.py        the .onnx file, and its int8 form
    openvino.py    the .xml file with its .bin
    check.py       the written file, run on images against PyTorch

`write` does it all. A file is checked before it gets its name.
"""

from dtem.export.files import FORMATS, Written, write

__all__ = ["FORMATS", "Written", "write"]
