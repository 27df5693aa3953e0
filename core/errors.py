"""The errors that quantplug raises on what a user passed, one type for each stage of the flow.

Every message is one sentence that says what is wrong, where, which value was found and what to do.
"""

import difflib
import re
from collections.abc import Iterable

_QUOTED = re.compile(r"'([^'\n]{201,})'")


class QuantplugError(Exception):
    """Base of every error that quantplug raises on purpose; a quoted value of any length is cut in its middle."""

    def __init__(self, message: object = "") -> None:
        super().__init__(_QUOTED.sub(lambda found: f"'{found[1][:60]}...{found[1][-60:]}'", str(message)))


class PatternError(QuantplugError, ValueError):
    """A pattern names an operator or an operand that the schema does not have."""


class ConfigError(QuantplugError, ValueError):
    """A backend, config, scope or option has a name or value that does not exist."""


class ModelError(QuantplugError, TypeError):
    """The model is not a graph that this stage accepts."""


class AnnotationError(QuantplugError, ValueError):
    """An annotation on a graph cannot be carried out."""


class CalibrationError(QuantplugError, ValueError):
    """Calibration data or an observer's state does not allow quantization parameters."""


class ConvertError(QuantplugError, RuntimeError):
    """A prepared model cannot be converted."""


class LoweringError(QuantplugError, RuntimeError):
    """A converted model cannot be lowered, or its artefact does not run."""


class TrialError(QuantplugError, RuntimeError):
    """A process that made a trial of a search ended, or cannot read what it was sent."""


class ArtefactError(QuantplugError, ValueError):
    """A file that was to be read or written is missing, unreadable or of the wrong kind."""


class QuantplugWarning(UserWarning):
    """What a user should know though nothing fails; one sentence, on the command line too."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a hint to the known name that is spelled most like another, "" where none is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def first_line(error: BaseException) -> str:
    """Returns what another library's error says in one line: its type and the first of its text that is whole."""
    try:
        text = str(error).strip()
    except Exception:  # of somebody else's class
        text = ""
    return f"{type(error).__name__}: {shown(first_whole(text.splitlines()))}" if text else type(error).__name__


def first_whole(lines: Iterable[str]) -> str:
    """Returns the first line of a text, and those behind it as long as one ends in a colon that announces the next."""
    found: list[str] = []
    for line in filter(None, map(str.strip, lines)):
        found.append(line)
        if not line.endswith(":"):
            break
    return " ".join(found).rstrip(":.")


LONGEST = 120


def shown(value: object) -> str:
    """Returns a value of the user's as a message quotes it: one line of bounded length."""
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
