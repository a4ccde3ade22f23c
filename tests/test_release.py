"""Files around the package say the same thing: workflows call make targets, extras are checked, versions agree."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import dtem

ROOT = Path(__file__).parents[1]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_make_targets_and_nothing_else(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        program, target, *variables = command.split()
        assert program == "make"
        assert target in TARGETS
        assert variables == ["PYTHON=python"]


def test_ci_runs_on_three_systems_and_three_pythons() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    assert [len(matrix["os"]), len(matrix["python"])] == [3, 3]
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert oldest == f">={matrix['python'][0]}"


def test_every_extra_is_installed_and_used() -> None:
    spec = importlib.util.spec_from_file_location("packages", ROOT / ".ci" / "packages.py")
    assert spec is not None
    assert spec.loader is not None
    packages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packages)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(packages.USES) == {"", *extras}


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    heading = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert heading == f"## {citation['version']} ({citation['date-released']})"
    assert citation["version"] == dtem.__version__


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_what_they_name_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    for path in re.findall(r"`((?:src|tests|benchmarks|docs)/[\w/.]*)`", text) + re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / path).exists(), path
    assert set(re.findall(r"`make ([\w-]+)", text)) <= TARGETS
    assert set(re.findall(r"python -m (benchmarks\.\w+)", text)) <= {
        f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("*.py")
    }
