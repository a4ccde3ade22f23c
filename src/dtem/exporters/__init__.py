"""Patched models as files for other runtimes, at a fixed r. `export.export` does it all.

export.py      dtem.export: trace, write, check, name
program.py     torch.export with a dynamic batch size; the .pt2 file
operators.py   torch operators in ONNX
onnx_merge.py  the merge operator in ONNX
folding.py     norms and biases folded into weights
onnx.py        the .onnx file, and its int8 form
openvino.py    the .xml file with its .bin
check.py       agreement of a file with PyTorch
engines.py     a model in any engine, to be timed
"""
