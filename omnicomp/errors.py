"""The errors that omnicomp raises on purpose; each message is one sentence that says what to do.

`OmnicompError` is what a caller catches. Errors that leave the backend while torch.compile is at work are raised
through `omnicomp._torch.dynamo.control_flow.user_error`, which keeps them from being wrapped in a page of compiler
frames.
"""

import difflib
from collections.abc import Callable, Iterable

from omnicomp.safety.escapes import printable
from omnicomp.safety.privacy import cleaner, logger

log = logger("omnicomp")
_READ = 2**16


class OmnicompError(Exception):
    """Base class of every error that omnicomp raises on purpose."""


class OptionError(OmnicompError, ValueError):
    """An option of `torch.compile(..., options=...)` or of the command line is unknown or has a wrong value."""


class DeviceError(OmnicompError):
    """A device was named that is unknown or not available here."""


class LegaliseError(OmnicompError):
    """A graph needs a dtype that the device lacks, and no other may take its place."""


class PassError(OmnicompError):
    """A pass broke its contract, for example by reporting `modified=False` for a graph that it changed."""


class OverrideError(OmnicompError, ValueError):
    """An override was declared wrongly or clashes with another one."""


class EngineError(OmnicompError):
    """An engine is unknown, can't be loaded, or broke its contract."""


class LoweringError(OmnicompError):
    """No lowering of the policy could build a subgraph, or a retreat was refused because it would be wrong."""


class FallbackError(OmnicompError):
    """More runs eager than the option `fallback` allows; the message names the operators, their lines and levers."""


class GradientError(OmnicompError, RuntimeError):
    """A gradient was asked for that neither the compiled backward nor eager's autograd can give in that call."""


class AcknowledgeError(OmnicompError):
    """The file that acknowledges fallbacks can't be read, or is no TOML."""


class CompilerFaultError(OmnicompError):
    """A graph was kept from torch's compiler, which would have compiled it to something else than eager's results."""


class RanksError(OmnicompError, RuntimeError):
    """The ranks of a job compiled a graph that communicates in different ways, or one of them does not come."""


class SaveError(OmnicompError, RuntimeError):
    """A compiled function can't be saved, or what was saved can't be loaded in this process."""


class TimelineError(OmnicompError):
    """A timeline file can't be read: it is missing, not JSON Lines, or of a newer schema."""


class ReportError(OmnicompError):
    """A report can't be read: it is missing, not what the audit wrote, or of a newer schema."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `'; did you mean "x"?'` for the known name closest to `name`, or an empty string if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f'; did you mean "{matches[0]}"?' if matches else ""


def wrong_value(
    name: str,
    given: object,
    accepted: str = "",
    *,
    example: object = "",
    known: Iterable[str] = (),
    verb: str = "be",
    error: type[OmnicompError] = OptionError,
) -> OmnicompError:
    """The error about a value of an option or of the command line: what was given, what is accepted, an example.

    Args:
        name: the option, as the user writes it.
        given: its value.
        accepted: what it takes, in words; left out, the known values.
        example: a value that would be right.
        known: values that would be right; the nearest is the example.
        verb: what the value can't do.
        error: the class.
    """
    words = list(known)
    shown = [repr(word) if "," in word else word for word in words]
    listed = f"{', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else "".join(shown)
    text = given if isinstance(given, str) else str(given).removeprefix("torch.")
    such = f", for example {example}" if example != "" else ""
    return error(f"{name} can't {verb} {given!r}; it takes {accepted or listed}{nearest(text, words) or such}")


def first_line(error: BaseException) -> str:
    """The first line of an error that says something, with its type, at most 300 characters.

    Secrets in it are hidden, and control characters replaced; an error that can't be shown costs its text alone.
    """
    inner: BaseException = getattr(error, "inner_exception", error)
    name = type(inner).__name__
    try:
        said = str(inner)[:_READ]
    except Exception as failure:  # noqa: BLE001 - the user's own class may raise anything
        said = f"its message can't be shown: {type(failure).__name__}"
    lines = [line.strip() for line in printable(cleaner().secrets(said)).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return (text if text.startswith(name) else f"{name}: {text}")[:300]


def add_note(error: BaseException, note: str) -> None:
    """Add a line that is printed below an error; before Python 3.11, which has no notes, it is logged as well."""
    if hasattr(error, "add_note"):
        error.add_note(note)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
        log.error("%s: %s", first_line(error), note)


class harmless:
    """Inside, an exception is logged with its traceback, and what follows the block goes on.

    For what only tells of the program: its results are there already, and must not be lost with the record of them.
    """

    def __init__(self, what: str) -> None:
        """Say what is lost, should it raise."""
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception):
            return False
        said = "omni: %s could not be recorded, and the program goes on without that; report the error"
        log.warning(said, self._what, exc_info=error)
        return True


class Once:
    """A function that runs at its first call and never again, also when threads race for it.

    It records something: should it raise, that is logged, and the caller goes on.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._pending = [function]

    def __call__(self) -> None:
        """Run the function, unless it has run or is running."""
        try:
            function = self._pending.pop()  # atomic: exactly one thread gets it
        except IndexError:
            return
        with harmless("what ran"):
            function()
