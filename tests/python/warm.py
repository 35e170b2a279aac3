"""Processes that run a Python file as fresh ones would, without the seconds that importing torch takes.

A server, started once for each rank number and so with a hash seed of its own, has imported what test programs need and
nothing else: no engine, no group, no thread. It forks for each process, which takes over files, environment and arguments.
A keeper between them waits for its end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

_SERVERS: dict[tuple[int, str], subprocess.Popen[bytes]] = {}
_SOCKETS: dict[tuple[int, str], socket.socket] = {}
_NUM_SERVERS = 4
_IMPORTED = "torch torch._dynamo torch.distributed.tensor numpy pytest pannier pannier.zero"
# What is read while modules are imported: a process that changes it begins from nothing.
_FIXED = ("PANNIER_", "OMP_", "MKL_", "TORCH_", "LD_", "PYTHON", "CUDA_", "PATH")


class Process:
    """A process; what subprocess.Popen calls the same does the same."""

    def __init__(self, file: str, arguments: Sequence[str], environment: Mapping[str, str], number: int) -> None:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        read, self._stdin = os.pipe()
        self._status, status = os.pipe()
        request = {"argv": [file, *arguments], "environment": dict(environment), "folder": os.getcwd()}
        message = json.dumps(request).encode()
        server = _server(number, environment)
        socket.send_fds(
            server, [len(message).to_bytes(8, "little")], [read, self._out.fileno(), self._err.fileno(), status]
        )
        server.sendall(message)
        os.close(read)
        os.close(status)
        self.pid = int(self._line(None))
        self.returncode: int | None = None

    def _line(self, timeout: float | None) -> bytes:
        line = b""
        end = None if timeout is None else time.monotonic() + timeout
        while not line.endswith(b"\n"):
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._status], [], [], left)[0]:
                raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
            byte = os.read(self._status, 1)
            if not byte:
                raise OSError("the server of warm processes is gone")
            line += byte
        return line

    def poll(self) -> int | None:
        """The exit code, if the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(int(self._line(timeout)))
            os.close(self._status)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Ends its standard input, waits, and returns what it wrote."""
        self.close_stdin()
        self.wait(timeout)
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(io.TextIOWrapper(file, errors="replace").read())
        return texts[0], texts[1]

    def close_stdin(self) -> None:
        """It reads the end of its input."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it, and lets its input go."""
        self.send_signal(signal.SIGKILL)
        self.close_stdin()


def _server(number: int, environment: Mapping[str, str]) -> socket.socket:
    fixed = json.dumps({name: value for name, value in sorted(environment.items()) if name.startswith(_FIXED)})
    key = (number % _NUM_SERVERS, fixed)
    if key not in _SERVERS:
        ours, theirs = socket.socketpair()
        _SERVERS[key] = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=dict(environment),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        _SOCKETS[key] = ours
        atexit.register(ours.close)
    return _SOCKETS[key]


def _received(connection: socket.socket) -> tuple[dict[str, object], list[int]] | None:
    size, files, _, _ = socket.recv_fds(connection, 8, 4)
    if not size:
        return None
    message = b""
    while len(message) < int.from_bytes(size, "little"):
        message += connection.recv(1 << 16)
    return json.loads(message), files


def _keep(files: list[int]) -> bool:
    """Forks the process and waits for it; true in the process itself."""
    *own, status = files
    pid = os.fork()
    if pid == 0:
        for number, file in enumerate(own):
            os.dup2(file, number)
        for file in files:
            os.close(file)
        return True
    for file in own:
        os.close(file)
    os.write(status, b"%d\n" % pid)
    _, how = os.waitpid(pid, 0)
    os.write(status, b"%d\n" % how)
    os._exit(0)


def _serve(connection: socket.socket) -> dict[str, object]:
    """Forks for each request, until the socket is closed; returns in the processes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while (received := _received(connection)) is not None:
        request, files = received
        if os.fork() == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(files)
            return request
        for file in files:
            os.close(file)
    os._exit(0)


def _main() -> None:
    for name in _IMPORTED.split():
        __import__(name)
    gc.collect()
    gc.freeze()  # Else each process walks through all that was imported, and copies its pages, with every collection.
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    os.chdir(str(request["folder"]))
    sys.argv = list(request["argv"])  # type: ignore[call-overload]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
