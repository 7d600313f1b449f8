"""The wheel holds exactly the three trees under one name, and the README tells the truth."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TREES = {"sglang_pd": "sglang_pd", "protocol": "sglang_pd/protocol", "backends": "sglang_pd/backends"}
"""Folder of the checkout -> where it lies once installed."""


def sources(repository: Path, pattern: str) -> dict[str, Path]:
    """Files of the three trees: place in the wheel -> place in the checkout."""
    return {
        f"{inside}/{path.relative_to(repository / folder).as_posix()}": path
        for folder, inside in TREES.items()
        for path in (repository / folder).rglob(pattern)
        if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="session")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the trees: other builds and leftovers stay out."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(repository / name, copy)
    for folder in TREES:
        shutil.copytree(repository / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "-w", str(out), str(copy)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_every_package_is_listed(repository: Path) -> None:
    text = (repository / "pyproject.toml").read_text(encoding="utf-8")
    (listing,) = re.findall(r"^packages = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    listed = set(re.findall(r'"([^"]+)"', listing))
    present = {str(Path(place).parent).replace("/", ".") for place in sources(repository, "*.py")}
    assert listed == present, (
        f"pyproject.toml, [tool.setuptools] packages: add {sorted(present - listed)}, remove {sorted(listed - present)}"
    )


def test_every_package_has_an_init(repository: Path) -> None:
    places = set(sources(repository, "*.py"))
    assert {f"{Path(place).parent.as_posix()}/__init__.py" for place in places} <= places


def test_the_wheel_holds_the_three_trees_and_nothing_else(repository: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    installed = {name for name in names if ".dist-info/" not in name}
    assert installed == set(sources(repository, "*.py")) | set(sources(repository, "py.typed"))
    assert {f"{inside}/py.typed" for inside in TREES.values()} <= installed
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_wheel_imports_without_the_checkout(repository: Path, wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import sglang_pd.protocol.errors as e, sglang_pd.backends.base as b; print(e.__file__); print(b.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(tmp_path) for line in done.stdout.split())


def test_the_readme_example_prints_what_the_readme_says(repository: Path) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    found = re.search(
        r"<!-- example -->\s*```python\n(.*?)```\s*```text\n(.*?)```\s*<!-- /example -->", text, re.DOTALL
    )
    assert found, "README.md: the example stands between <!-- example --> and <!-- /example -->"
    program, expected = found.groups()
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode != 0, "the README shows a refusal; this program succeeded"
    *_, last = done.stderr.strip().splitlines()
    assert last == expected.strip()


def test_the_readme_is_two_screens(repository: Path) -> None:
    lines = (repository / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
