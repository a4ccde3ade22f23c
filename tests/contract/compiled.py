"""Compiles patched models and prints what happened, as JSON. Run as a script by `test_compile.py`: in a process of its
own no import hook checks shapes, which would stand between torch.compile and the code that users run."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from contract.hosts import R, ask, fresh, images, patch
from dtem import integrations


def compiled(name: str, method: str, steer: bool = False) -> dict[str, float]:
    """Largest difference from eager and graphs compiled; with `steer`, with norms of the adapter's own, and also after
    changing r and with gradients."""
    model = fresh(name)
    if hasattr(model, "blocks"):
        model.blocks = model.blocks[:2]
    handle = patch(model, method, R, norms=steer)
    with torch.no_grad():
        for parameter in handle.method.affine.parameters() if handle.method.affine is not None else ():
            parameter.normal_(0.0, 0.2)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def difference(x: torch.Tensor) -> float:
        return float((run(x) - ask(model, x)).abs().max())

    torch.compiler.reset()
    run = torch.compile(integrations.as_logits_fn(model), fullgraph=True, backend=backend)
    x, y = images(name), images(name, seed=1)
    with torch.no_grad():
        result = {"first": difference(x), "graphs": len(graphs), "second": difference(y), "graphs_after": len(graphs)}
        if steer:
            for r in (3, 0):
                handle.r = r
                result[f"r={r}"] = difference(x)
    if steer:
        handle.r = 5
        result["gradients"] = difference(x)
    return result


def main() -> None:
    report = {}
    for case in sys.argv[1:]:
        try:
            name, method, *steer = case.split("-")
            report[case] = compiled(name, method, bool(steer))
        except Exception as error:
            report[case] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
