"""What every test may ask for: 64-bit arrays in a scope, and a shell to call."""

import gc
import os
import platform
import shutil
import sys
from pathlib import Path

import jax
import pytest

# Small programs, each run once or twice: what they cost is XLA's compiler, a third of it so. LLVM's level 0 contracts a·b + c to
# one rounding in some programs and not in others, which parts weights (drawn in float32) in the eighth digit; AVX has none.
LEVEL_0 = platform.machine().lower() in ("x86_64", "amd64")
FASTER = ["--xla_backend_optimization_level=1", "--xla_cpu_use_fusion_emitters=false"]
FASTER += ["--xla_cpu_parallel_codegen_split_count=1"]  # the other core has tests of its own
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FASTER, *["--xla_cpu_max_isa=AVX"] * LEVEL_0])
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(LEVEL_0)  # of the processes that tests start
jax.config.update("jax_disable_most_optimizations", LEVEL_0)
gc.set_threshold(200_000, 20, 100)  # JAX lets its own garbage go at every collection


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Let compiled programs go before they take all of a process's mappings: each holds a few of Linux's 65,530."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 45_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def optimised(request):
    """Let XLA optimise what runs for longer than it compiles, in tests marked ``optimised``."""
    if marked := LEVEL_0 and request.node.get_closest_marker("optimised"):
        jax.config.update("jax_disable_most_optimizations", False)
    yield
    if marked:
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    """Make float64 exist while a test runs; gradflow itself needs no such switch."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def eager():
    """Run primitive by primitive: a wide table of small stacks would otherwise spend its time in XLA's compiler."""
    with jax.enable_x64(True), jax.disable_jit():
        yield


def forget():
    """Empty every cache of gradflow's that may hold a compiled formula; JAX's own operations stay compiled."""
    for name, module in list(sys.modules.items()):
        if name.startswith("gradflow"):
            own = list(vars(module).values())
            for value in own + [v for c in own if isinstance(c, type) for v in vars(c).values()]:
                for clear in ("cache_clear", "clear_cache"):  # functools' name, and jax.jit's
                    if not isinstance(value, type):
                        getattr(value, clear, lambda: None)()


@pytest.fixture
def tamper(monkeypatch):
    """Replace a derivation by a wrong one, with empty caches before and after."""

    def swap(module, name, wrong):
        monkeypatch.setattr(module, name, wrong)
        forget()

    yield swap
    monkeypatch.undo()
    forget()


@pytest.fixture
def folder(tmp_path):
    """A good BERT folder to spoil."""
    from gradflow.checkpoints.parity import FIXTURES

    return shutil.copytree(FIXTURES / "bert", tmp_path / "model")


@pytest.fixture(scope="session")
def bert():
    """The same, read."""
    from gradflow import checkpoints

    return checkpoints.load(checkpoints.parity.FIXTURES / "bert")


@pytest.fixture
def shell(monkeypatch, capsys):
    """Call ``gradflow ARGS`` in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        from gradflow import cli

        monkeypatch.setattr(sys, "argv", ["gradflow", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked ``repeats`` the first cases run always; the others are ``slow``."""
    met = {}
    for item in items:
        for mark in item.iter_markers("repeats"):
            test = (item.path, item.cls, item.originalname)
            met[test] = met.get(test, 0) + 1
            if met[test] > mark.kwargs.get("keep", 1):
                item.add_marker(pytest.mark.slow)
