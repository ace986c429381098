"""A program on a terminal: what its screen shows at every moment."""

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyte

ROOT = Path(__file__).parents[2]


@dataclass
class Session:
    """What was seen.

    Attributes:
        screens: each picture of the screen that differs from the one before it, as text without trailing blanks.
        raw: all that was written.
        status: the exit status.
    """

    screens: list[str]
    raw: bytes
    status: int

    @property
    def last(self) -> str:
        """What is left on the screen."""
        return self.screens[-1]


def run(
    program: str, environment: Mapping[str, str], *, rows: int = 24, columns: int = 120, stdout: str = ""
) -> Session:
    """Run a Python program on a terminal of its own.

    Args:
        program: its source.
        environment: what differs from this process' variables; empty values are removed.
        rows: of the terminal.
        columns: of the terminal.
        stdout: a file that standard output goes to in place of the terminal.
    """
    # The size is the terminal's, whatever another test or the shell has put into these two.
    unset = dict.fromkeys(("CI", "COLUMNS", "LINES", "RANK"), "")
    variables = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT), **unset, **environment}
    pid, descriptor = pty.fork()
    if pid == 0:
        try:
            if stdout:
                os.dup2(os.open(stdout, os.O_WRONLY | os.O_CREAT), 1)
            variables = {name: value for name, value in variables.items() if value}
            os.execve(sys.executable, [sys.executable, "-c", program], variables)
        finally:
            os._exit(127)
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    screens, raw = [""], b""
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not data:
            break
        raw += data
        stream.feed(data)
        picture = "\n".join(line.rstrip() for line in screen.display).rstrip()
        if picture != screens[-1]:
            screens.append(picture)
    os.close(descriptor)
    return Session(screens, raw, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
