"""What all tests share: hypothesis profiles, one thread for numeric libraries, and the package as a plain tree."""

from __future__ import annotations

import os
from pathlib import Path

# Two cores are shared by everything; must be set before numpy or torch are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parent.parent

# No deadlines: a busy machine is not a defect. Repeatable where a failure would block others (CI), random elsewhere.
settings.register_profile(
    "fast",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", parent=settings.get_profile("fast"), derandomize=False, max_examples=1000)
settings.load_profile("fast")


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Workers of these tests shun the ports of each other's dead, and of nobody else's."""
    os.environ["SGLANG_PD_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def package_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `sglang_pd` lies as it is installed, made of links to the checkout.

    For tools that walk files instead of importing (mypy on a snippet: set MYPYPATH to it): they do not follow the
    import hook of an editable install.
    """
    root = tmp_path_factory.mktemp("tree")
    package = root / "sglang_pd"
    package.mkdir()
    for entry in (REPOSITORY / "sglang_pd").iterdir():
        (package / entry.name).symlink_to(entry)
    for folder in ("protocol", "backends"):
        (package / folder).symlink_to(REPOSITORY / folder)
    return root
