"""The progress line: what a long compilation is doing, for how long, and what it waits for.

It stands below the program's own output and is erased before the program writes again. Nothing is drawn where standard
error is no terminal, and nothing in the first two seconds. `rich.status` can't draw it: it takes the place of standard
output, so that what a program prints into a file meanwhile goes to the terminal.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

from omnicomp.safety.escapes import one_line

if TYPE_CHECKING:
    from rich.console import Console

VARIABLE: Final = "OMNICOMP_PROGRESS"

# Seconds before anything is drawn, and between two pictures.
_PATIENCE: Final = 2.0
_INTERVAL: Final = 0.2
_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

# Erase from the cursor on; make sure that there is a line below, without leaving this one.
_ERASE: Final = "\x1b[J"
_ROOM: Final = "\x1bD\x1b[A"
_SAVE, _RESTORE = "\x1b7", "\x1b8"

clock = time.monotonic
waits_for: Callable[[int], str] | None = None
"""Says what a thread, given by its id, waits for; `omnicomp.timeline.activity` sets it."""


class Step:
    """A step under way."""

    def __init__(self, text: str, *, shown: bool) -> None:
        """Begin now."""
        self.text = text
        self.shown = shown
        self.start = clock()

    def say(self, text: str) -> None:
        """Change the text; the clock goes on."""
        self.text = text


class _State:
    """The steps under way, by thread, and the thread that draws them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may print while the line is erased
        self.steps: dict[int, list[Step]] = {}
        self.painter: _Painter | None = None
        self.forked = False


_state = _State()


def _forget() -> None:
    """A forked child draws nothing: the line is its parent's."""
    global _state
    painter = _state.painter
    _state = _State()
    _state.forked = True
    if painter is not None:
        painter.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def step(text: str, *, shown: bool = True) -> Generator[Step]:
    """Mark a step that may take long.

    Steps may be inside of one another; the innermost is shown, with the time since the outermost began.

    Args:
        text: what is done: `measuring softmax_topk, 3 of 8`.
        shown: whether it may be drawn; steps inside of one that may not are not drawn either.

    Returns:
        The step, to say more while it is under way.
    """
    state, thread = _state, threading.get_ident()
    stack = state.steps.setdefault(thread, [])
    item = Step(text, shown=shown and (stack[-1].shown if stack else wanted()))
    stack.append(item)
    if item.shown:
        _begin(state)
    try:
        yield item
    finally:
        stack.remove(item)
        if not stack:
            state.steps.pop(thread, None)
            if item.shown:
                _end(state)


def _begin(state: _State) -> None:
    with state.lock:
        if state.painter is None:
            painter = _Painter(state)
            with contextlib.suppress(RuntimeError):  # no thread can be started: there is no line then
                painter.start()
                state.painter = painter


def _end(state: _State) -> None:
    """Stop drawing when no thread has a step any more; the line is gone when this returns."""
    with state.lock:
        if any(item.shown for stack in list(state.steps.values()) for item in list(stack)):
            return
        painter, state.painter = state.painter, None
    if painter is not None:
        painter.stop()


def wanted() -> bool:
    """Whether a line may be drawn: on a terminal that a person looks at, by one process of a job, and not switched off.

    `OMNICOMP_PROGRESS=0` switches it off, and `OMNICOMP_PROGRESS=1` on where the environment says CI.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice == "0" or _state.forked or not _is_terminal(sys.stderr):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("RANK", "LOCAL_RANK")):
        return False
    if os.environ.get("TERM", "") in ("", "dumb", "unknown") or "ipykernel" in sys.modules:
        return False
    return choice == "1" or not os.environ.get("CI")


def _is_terminal(stream: Any) -> bool:
    try:
        return stream is not None and not stream.closed and stream.isatty() and os.isatty(stream.fileno())
    except (AttributeError, OSError, ValueError):  # closed, detached, or no file at all
        return False


def current_line() -> str:
    """What the line would say now, or an empty text: `omni 14 s: g0 > Inductor builds g0.forward.0 (12 s), waiting …`.

    The first step that a thread is in, with the time since it began, then the innermost one with its own.
    """
    now = clock()
    for thread, stack in list(_state.steps.items()):
        steps = [item for item in list(stack) if item.shown]
        if not steps:
            continue
        first, last = steps[0], steps[-1]
        waits = waits_for(thread) if waits_for is not None else ""
        inner = "" if last is first else f" > {last.text} ({_seconds(now - last.start)})"
        return one_line(f"omni {_seconds(now - first.start)}: {first.text}{inner}{f', {waits}' if waits else ''}")
    return ""


def _seconds(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"


class _Painter(threading.Thread):
    """Draws the line until it is stopped; the program's streams erase it before they are written to."""

    def __init__(self, state: _State) -> None:
        super().__init__(name="omnicomp-progress", daemon=True)
        self._state = state
        self._over = threading.Event()
        self._terminal = sys.stderr
        # Here and not at the first picture: the program goes on in its own thread then, and may draw random numbers.
        from rich.console import Console

        import omnicomp.safety.rich_style  # noqa: F401  # pyright: ignore[reportUnusedImport]

        self._console = Console(file=self._terminal)
        self._streams: list[Any] = []
        self._visible = False

    def stop(self) -> None:
        """Erase the line and stop drawing."""
        self._over.set()
        with self._state.lock:
            self._erase()
            self.release()

    def release(self) -> None:
        """Give the streams their own `write` back."""
        for stream in self._streams:
            stream.__dict__.pop("write", None)
        self._streams.clear()

    def run(self) -> None:
        """Wait, then draw."""
        if self._over.wait(_PATIENCE):
            return
        console, number = self._console, 0
        plain = not console.encoding.lower().startswith("utf")
        while True:
            with self._state.lock:
                if self._over.is_set():
                    return
                line = current_line()
                if line and _is_terminal(self._terminal):
                    frame = "*" if plain else _FRAMES[number % len(_FRAMES)]
                    self._draw(console, f"{frame} {line}")
                else:
                    self._erase()
            number += 1
            if self._over.wait(_INTERVAL):
                return

    def _draw(self, console: "Console", line: str) -> None:
        if not self._streams:
            self._guard()
        from rich.text import Text

        text = Text(line, style="dim")
        with console.capture() as picture:
            width = max(console.width - 1, 1)
            console.print(text, no_wrap=True, overflow="ellipsis", width=width, end="", highlight=False)
        self._put(f"{_ERASE}{_ROOM}{_SAVE}\r\n{picture.get()}{_RESTORE}")
        self._visible = True

    def _erase(self) -> None:
        if self._visible:
            self._visible = False
            self._put(_ERASE)

    def _put(self, text: str) -> None:
        """Write past the stream's buffer, in which half a line of the program's may wait."""
        data = text.encode(getattr(self._terminal, "encoding", None) or "utf-8", "replace")
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone; the program goes on
            os.write(self._terminal.fileno(), data)

    def _guard(self) -> None:
        """Wrap `write` of the program's streams to erase the line first; the streams stay the same objects."""
        for stream in {id(each): each for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}.values():
            if _is_terminal(stream) and hasattr(stream, "__dict__") and "write" not in stream.__dict__:
                stream.write = self._guarded(stream.write)  # type: ignore[method-assign]
                self._streams.append(stream)

    def _guarded(self, write: Callable[[str], int]) -> Callable[[str], int]:
        def guarded(text: str) -> int:
            with self._state.lock:
                self._erase()
                return write(text)

        return guarded
