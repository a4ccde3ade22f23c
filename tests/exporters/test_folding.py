"""Biases that become part of weights: the same numbers from a graph that has fewer nodes."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason='needs pip install ".[export]"')
onnx_ir = pytest.importorskip("onnx_ir", reason='needs pip install ".[export]"')
onnxruntime = pytest.importorskip("onnxruntime", reason='needs pip install ".[export]"')

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from dtem.exporters import folding  # noqa: E402

WIDTH = 12


def graph(nodes: list, weights: dict[str, np.ndarray], outputs: dict[str, list[int]]):
    """A model of images x (2, 5, WIDTH) whose first node is a norm, x -> h."""
    random = np.random.default_rng(0)
    weights = {
        "scale": random.normal(size=WIDTH) + 1.0,
        "shift": random.normal(size=WIDTH),
        **weights,
    }
    held = [
        numpy_helper.from_array(np.asarray(value, np.float32) if value.dtype == np.float64 else value, name)
        for name, value in weights.items()
    ]
    norm = helper.make_node("LayerNormalization", ["x", "scale", "shift"], ["h"], axis=-1)
    made = helper.make_graph(
        [norm, *nodes],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 5, WIDTH])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        held,
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def run(model) -> list[np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    x = np.random.default_rng(1).normal(size=(2, 5, WIDTH)).astype(np.float32) * 3 + 1
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


def fold(model) -> int:
    """In place, as the exporter does with its graph."""
    graph = onnx_ir.from_proto(model)
    count = folding.fold(graph)
    model.CopyFrom(onnx_ir.to_proto(graph))
    return count


def kinds(model) -> list[str]:
    return [node.op_type for node in model.graph.node]


def linear(size: int, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(WIDTH, size)), random.normal(size=size)


def test_every_way_to_read_a_norm() -> None:
    (w, b), (v, c) = linear(7), linear(4, seed=3)
    nodes = [
        helper.make_node("MatMul", ["h", "w"], ["product"]),
        helper.make_node("Add", ["b", "product"], ["plain"]),
        helper.make_node("Transpose", ["h"], ["turned"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["turned", "w"], ["without"]),
        helper.make_node("Reshape", ["h", "flat"], ["rows"]),
        helper.make_node("Gemm", ["rows", "v", "c"], ["gemm"], transB=1),
    ]
    weights = {"w": w, "b": b, "v": v.T.copy(), "c": c, "flat": np.array([-1, WIDTH])}
    model = graph(nodes, weights, {"plain": [2, 5, 7], "without": [5, 2, 7], "gemm": [10, 4]})
    before = run(model)
    assert fold(model) == 1
    assert kinds(model) == ["LayerNormalization", "MatMul", "Transpose", "MatMul", "Reshape", "MatMul"]
    for expected, found in zip(before, run(model), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)
    read = {name for node in model.graph.node for name in node.input}
    assert {weight.name for weight in model.graph.initializer} <= read, "weights that nobody reads"


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        pytest.param([("Mul", ["h", "h"], ["y"], {})], {"y": [2, 5, WIDTH]}, id="another operator"),
        pytest.param([], {"h": [2, 5, WIDTH]}, id="an output"),
        pytest.param([("MatMul", ["v", "h"], ["y"], {})], {"y": [2, 3, WIDTH]}, id="from the right"),
        pytest.param(
            [("Transpose", ["h"], ["t"], {"perm": [0, 2, 1]}), ("MatMul", ["t", "u"], ["y"], {})],
            {"y": [2, WIDTH, 3]},
            id="channels turned",
        ),
        pytest.param(
            [("Reshape", ["h", "half"], ["t"], {}), ("MatMul", ["t", "s"], ["y"], {})],
            {"y": [20, 3]},
            id="channels split",
        ),
        pytest.param(
            [("Reshape", ["h", "flat"], ["t"], {}), ("Gemm", ["t", "w"], ["y"], {"alpha": 2.0})],
            {"y": [10, 7]},
            id="a scaled product",
        ),
    ],
)
def test_what_is_no_linear_layer_leaves_the_norm_alone(nodes, outputs) -> None:
    w, _ = linear(7)
    random = np.random.default_rng(5)
    made = [helper.make_node(kind, ins, outs, **settings) for kind, ins, outs, settings in nodes]
    made.append(helper.make_node("MatMul", ["h", "w"], ["product"]))
    weights = {
        "w": w,
        "v": random.normal(size=(3, 5)),
        "u": random.normal(size=(5, 3)),
        "s": random.normal(size=(WIDTH // 2, 3)),
        "half": np.array([20, WIDTH // 2]),
        "flat": np.array([10, WIDTH]),
    }
    model = graph(made, weights, {**outputs, "product": [2, 5, 7]})
    before = run(model)
    assert fold(model) == 0
    for expected, found in zip(before, run(model), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_sum_that_is_no_bias_stays() -> None:
    w, _ = linear(7)
    position = np.random.default_rng(4).normal(size=(5, 7))
    nodes = [
        helper.make_node("MatMul", ["h", "w"], ["product"]),
        helper.make_node("Add", ["product", "position"], ["y"]),
    ]
    model = graph(nodes, {"w": w, "position": position}, {"y": [2, 5, 7]})
    before = run(model)
    assert fold(model) == 1
    assert kinds(model) == ["LayerNormalization", "MatMul", "Add"]
    np.testing.assert_allclose(run(model)[0], before[0], atol=2e-5)


def test_a_norm_without_a_shift() -> None:
    w, b = linear(7)
    nodes = [helper.make_node("MatMul", ["h", "w"], ["product"]), helper.make_node("Add", ["product", "b"], ["y"])]
    model = graph(nodes, {"w": w, "b": b}, {"y": [2, 5, 7]})
    del model.graph.node[0].input[2]
    before = run(model)
    assert fold(model) == 1
    np.testing.assert_allclose(run(model)[0], before[0], atol=2e-5)


def test_outliers_cost_no_precision() -> None:
    """Channels a hundred times as large as others, as trained models have: no worse than with biases."""
    w, b = linear(7)
    nodes = [helper.make_node("MatMul", ["h", "w"], ["product"]), helper.make_node("Add", ["product", "b"], ["y"])]
    model = graph(nodes, {"w": w, "b": 10 * b}, {"y": [2, 5, 7]})
    scale = np.ones(WIDTH, np.float32)
    scale[0], scale[1] = 1e-3, 30.0
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(scale, "scale"))
    before = run(model)[0]
    assert fold(model) == 1
    assert np.abs(run(model)[0] - before).max() < 2e-6 * np.abs(before).max()
