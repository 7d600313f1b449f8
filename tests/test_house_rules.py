"""The rules of CONTRIBUTING.md that a machine can check, over every Python file of the repository."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def repository_files() -> tuple[Path, ...]:
    """Tracked files and new ones that git does not ignore, relative to the root; deleted ones left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=30).stdout.decode()
    return tuple(sorted(Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()))


def python_files() -> list[Path]:
    return [path for path in repository_files() if path.suffix == ".py"]


def product_files() -> list[Path]:
    return [path for path in python_files() if path.parts[0] in ("protocol", "backends", "sglang_pd")]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def report(found: list[str], rule: str) -> None:
    assert not found, rule + ":\n  " + "\n  ".join(found)


# Size


def oversized_functions(module: ast.Module) -> Iterator[tuple[Function, int]]:
    for node in ast.walk(module):
        if isinstance(node, Function) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node, lines


def parameters(function: Function, in_class: bool) -> int:
    """Named parameters of every form. Not counted: self or cls, *args and **kwargs."""
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in function.decorator_list)
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(named) - (in_class and not static)


def overloaded_functions(module: ast.Module) -> Iterator[tuple[Function, int]]:
    methods = {id(node) for owner in ast.walk(module) if isinstance(owner, ast.ClassDef) for node in owner.body}
    for node in ast.walk(module):
        if isinstance(node, Function):
            count = parameters(node, id(node) in methods)
            if count > MAX_PARAMETERS:
                yield node, count


def test_files_are_short() -> None:
    sizes = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in python_files()}
    report(
        [f"{p}: {n} lines" for p, n in sizes.items() if n > MAX_FILE_LINES], f"at most {MAX_FILE_LINES} lines a file"
    )


def test_functions_fit_on_a_screen() -> None:
    found = [
        f"{path}:{node.lineno}: {node.name} has {lines} lines"
        for path in python_files()
        for node, lines in oversized_functions(tree(path))
    ]
    report(found, f"at most {MAX_FUNCTION_LINES} lines a function")


def is_kernel(function: Function) -> bool:
    """Whether a function is compiled for the GPU (`@triton.jit`, with or without arguments)."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_functions_take_few_parameters() -> None:
    # A test's parameters are fixtures and strategies, which have no other way in; a GPU kernel's are its launch's.
    found = [
        f"{path}:{node.lineno}: {node.name} has {count} parameters"
        for path in python_files()
        for node, count in overloaded_functions(tree(path))
        if not (path.parts[0] == "tests" and node.name.startswith("test_")) and not is_kernel(node)
    ]
    report(found, f"at most {MAX_PARAMETERS} parameters (then a dataclass)")


def test_no_mixins() -> None:
    found = [
        f"{path}:{node.lineno}: {node.name}"
        for path in product_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and "mixin" in node.name.lower()
    ]
    report(found, "no mixins: hold an object instead")


# Bytes from outside never become code

BANNED_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# It pickles whatever crosses it. Processes of the product are started with subprocess and speak our own codec.
BANNED_IN_PRODUCT = {"multiprocessing"}
ALLOWED_IN_PRODUCT = {"multiprocessing.shared_memory", "multiprocessing.resource_tracker"}
BANNED_BUILTINS = {"eval", "exec"}
BANNED_METHODS = {"send_pyobj", "recv_pyobj"}
YAML_SAFE = {"safe_load", "safe_load_all", "safe_dump", "safe_dump_all"}
YAML_UNSAFE = {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all", "dump", "dump_all"}


def imported(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Every absolute import anywhere in the file, functions included: line and full dotted name."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and dotted(node.func) in ("importlib.import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def unsafe_call(call: ast.Call) -> str:
    """The name of what is wrong with this call, or nothing."""
    name = dotted(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in BANNED_BUILTINS:
        return name
    if isinstance(call.func, ast.Attribute) and call.func.attr in BANNED_METHODS:
        return call.func.attr
    if name.startswith("yaml.") and name.removeprefix("yaml.") in YAML_UNSAFE:
        return f"{name} (use one of {', '.join(sorted(YAML_SAFE))})"
    if isinstance(pickled := keywords.get("allow_pickle"), ast.expr) and ast.unparse(pickled) != "False":
        return f"{name}(allow_pickle=...)"
    if name == "torch.load" and ast.unparse(keywords.get("weights_only", ast.Constant(None))) != "True":
        return "torch.load without weights_only=True"
    return ""


def unsafe(module: ast.Module, banned: set[str]) -> Iterator[tuple[int, str]]:
    for line, name in imported(module):
        if name.split(".")[0] in banned and not any(name.startswith(allowed) for allowed in ALLOWED_IN_PRODUCT):
            yield line, f"import of {name}"
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and (what := unsafe_call(node)):
            yield node.lineno, what


def test_nothing_is_unpickled_or_evaluated() -> None:
    product = set(product_files())
    found = [
        f"{path}:{line}: {what}"
        for path in python_files()
        for line, what in unsafe(tree(path), BANNED_MODULES | (BANNED_IN_PRODUCT if path in product else set()))
    ]
    report(found, "data never becomes code: no pickle, marshal, shelve, eval, exec, unsafe YAML")


# The pure core

PURE_THIRD_PARTY = {"msgspec", "numpy", "xxhash", "sglang_pd"}
IMPURE_STDLIB = {
    *("asyncio", "concurrent", "ctypes", "http", "mmap", "multiprocessing", "queue", "random", "sched", "secrets"),
    *("select", "selectors", "signal", "socket", "socketserver", "ssl", "subprocess", "threading", "time", "urllib"),
}
# Transports move bytes between segments. Whoever needs one of these there is in the wrong room.
NOT_FOR_BACKENDS = {"handshake", "kinds", "manifest", "placement", "plan", "room", "spaces"}


def test_protocol_imports_nothing_impure() -> None:
    found = [
        f"{path}:{line}: {name}"
        for path in product_files()
        if path.parts[0] == "protocol"
        for line, name in imported(tree(path))
        if (top := name.split(".")[0]) in IMPURE_STDLIB
        or (top not in PURE_THIRD_PARTY and top not in sys.stdlib_module_names)
    ]
    report(found, "protocol knows no socket, clock, thread or device; it imports the stdlib, msgspec, numpy, xxhash")


def test_backends_know_no_kinds_or_layers() -> None:
    found = [
        f"{path}:{line}: {name}"
        for path in product_files()
        if path.parts[0] == "backends"
        for line, name in imported(tree(path))
        if name.startswith("sglang_pd.protocol.") and name.split(".")[2] in NOT_FOR_BACKENDS
    ]
    report(found, "backends know segments, offsets, lengths and peers")


BLOCKED_IMPORT = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocked())
import sglang_pd.protocol
for module in pkgutil.walk_packages(sglang_pd.protocol.__path__, "sglang_pd.protocol."):
    importlib.import_module(module.name)
    print(module.name)
"""


def test_protocol_imports_without_torch_and_zmq() -> None:
    blocked = {"torch", "zmq", "yaml", "nixl", "mooncake", "mori", "transformers", "triton", "cuda", "starlette"}
    program = BLOCKED_IMPORT.format(blocked=blocked)
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    modules = {p for p in product_files() if p.parts[0] == "protocol" and p.name not in ("__init__.py", "__main__.py")}
    names = {"sglang_pd." + ".".join(path.with_suffix("").parts) for path in modules}
    assert names <= set(done.stdout.split()), "not every module was imported"


# What the outside of one machine must not leak into the repository. Spelled in parts, so that this file passes itself.

MACHINE_PATHS = re.compile(
    r"(?<![\w.$/}-])/(?:"
    + "|".join(["wo" + "rk", "ro" + "ot", "ho" + r"me/\w+", "opt/wh" + "eels", "tmp/br" + "ief"])
    + r")\b"
)
REGISTRY_HOSTS = re.compile(
    "|".join(["py" + r"pi\.org", "python" + r"hosted\.org", "download.py" + r"torch\.org", "npm" + r"js\.org"])
)


def text_lines() -> Iterator[tuple[Path, int, str]]:
    for path in repository_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            yield path, number, line


def test_no_machine_paths_and_no_registry_hosts() -> None:
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, number, line in text_lines()
        if MACHINE_PATHS.search(line) or REGISTRY_HOSTS.search(line)
    ]
    report(found, "nothing committed names a folder of one machine or a registry's host")


# The rules bite: each is shown a breach

BREACHES: dict[str, str] = {
    "import": "import pickle",
    "from": "from marshal import loads",
    "nested": "def f():\n    import shelve",
    "dynamic": "import importlib\nimportlib.import_module('dill')",
    "process": "import multiprocessing",
    "eval": "eval('1')",
    "yaml": "import yaml\nyaml.load(stream, Loader=yaml.Loader)",
    "numpy": "np.load(f, allow_pickle=True)",
    "torch": "torch.load(f)",
    "zmq": "socket.recv_pyobj()",
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_is_found(name: str) -> None:
    assert list(unsafe(ast.parse(BREACHES[name]), BANNED_MODULES | BANNED_IN_PRODUCT))


def test_what_is_allowed_passes() -> None:
    source = "import yaml\nyaml.safe_load(s)\nmodel.eval()\ntorch.load(f, weights_only=True)\nre.compile('x')"
    source += "\nfrom multiprocessing import shared_memory\nnp.load(f, allow_pickle=False)"
    assert not list(unsafe(ast.parse(source), BANNED_MODULES | BANNED_IN_PRODUCT))


def counted(rule: Callable[[ast.Module], Iterator[tuple[Function, int]]], source: str) -> list[int]:
    return [number for _, number in rule(ast.parse(source))]


def test_sizes_are_counted() -> None:
    assert counted(oversized_functions, "def f():\n" + "    pass\n" * 60) == [61]
    assert counted(oversized_functions, "async def f():\n" + "    pass\n" * 59) == []
    assert counted(overloaded_functions, "def f(a, b, c, /, d, e, *, f, g): ...") == [7]
    assert counted(overloaded_functions, "def f(a, b, c, d, e, f, *args, **kwargs): ...") == []
    assert counted(overloaded_functions, "class C:\n def m(self, a, b, c, d, e, f): ...") == []
    assert counted(overloaded_functions, "class C:\n @staticmethod\n def m(a, b, c, d, e, f, g): ...") == [7]


def test_machine_paths_are_recognised() -> None:
    for part in ("wo" + "rk/main", "ro" + "ot/x", "ho" + "me/me"):
        assert MACHINE_PATHS.search(f"see /{part}") and not MACHINE_PATHS.search(f"see docs/{part}")
