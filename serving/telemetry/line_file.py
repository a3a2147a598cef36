"""A file (or pipe) that lines are appended to, and that survives what happens to files in production.

Writes are unbuffered: a line is in the system's hands when `write` returns, and nothing of ours holds a lock that the
interpreter would need at its end while a reader stalls. A file that was moved away is opened anew, as logrotate
expects.
"""

import os
import time
from pathlib import Path

ROTATION_SECONDS = 1.0
"""How often the path is asked whether it still is the file that is written to."""


_STDOUT = 1


class LineFile:
    """Appends lines. One thread writes."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None is standard output.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path = path
        self._fd = _STDOUT if path is None else _open(path)
        self._checked = time.monotonic()
        self._torn = False

    def write(self, line: bytes) -> None:
        """Appends a line; the newline is added. Blocks while a pipe is full.

        Raises:
            OSError: it could not be written, or only in part; the next line starts on a line of its own all the same.
        """
        self._follow()
        rest = memoryview(b"\n" + line + b"\n" if self._torn else line + b"\n")
        size = len(rest)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        finally:
            if rest:
                self._torn = self._torn or len(rest) < size
            else:
                self._torn = False

    def close(self) -> None:
        """Closes the file; standard output stays open."""
        if self._path is not None:
            os.close(self._fd)

    def _follow(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._checked < ROTATION_SECONDS:
            return
        self._checked = now
        try:
            at_path, ours = os.stat(self._path), os.fstat(self._fd)
            moved = (at_path.st_dev, at_path.st_ino) != (ours.st_dev, ours.st_ino)
        except FileNotFoundError:
            moved = True
        if moved:
            new = _open(self._path)
            os.close(self._fd)
            self._fd = new


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
