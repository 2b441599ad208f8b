"""Eight devices, and two real processes joined on loopback, give the numbers of one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import processes
import pytest

SCRIPT = Path(processes.__file__)


@pytest.fixture(scope="module", params=["brief", pytest.param("full", marks=pytest.mark.slow)])
def alone(request):
    return request.param, processes.figures(request.param)


def started(*arguments, flags=""):
    settings = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(*jobs):
    try:
        outputs = [job.communicate(timeout=240)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert all(job.returncode == 0 for job in jobs), outputs


def same(file, alone, devices):
    found = np.load(file)
    assert found["devices"] == devices
    for name, expected in alone.items():
        scale = np.nanmax(np.abs(expected))
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-12 * scale, err_msg=name)


def test_eight_devices(tmp_path, alone):
    kind, expected = alone
    ended(started(tmp_path / "eight.npz", kind, flags="--xla_force_host_platform_device_count=8"))
    same(tmp_path / "eight.npz", expected, 8)


@pytest.mark.slow
def test_two_processes(tmp_path, alone):
    kind, expected = alone
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended(*(started(tmp_path / f"{rank}.npz", kind, port, rank) for rank in (0, 1)))
    for rank in (0, 1):
        same(tmp_path / f"{rank}.npz", expected, 2)
