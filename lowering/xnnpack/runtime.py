"""The installed ExecuTorch runtime: loading a buffer, its threads, its kernels, and what it prints.

Before: the bytes of a `.pte`. After: a method that runs. The runtime's chatter (start-up notices on
the process's standard error, experimental-API warnings) is held back and only quoted when a call fails.
"""

import logging
import mmap
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from quantplug.core.errors import ConfigError, LoweringError, first_line
from quantplug.core.peers.linux import IS_HERE
from quantplug.lowering.executorch_names import reset_pool, threads_of_pool

# The runtime logs as `[file.cpp:123] text`, its operators for PyTorch as `E 12:34:56.78 executorch:file.h:91] text`;
# every other line on the stream is somebody else's.
_RUNTIME_LINE = re.compile(rb"^(?:\[[\w.\-]+\.(?:cpp|c|h):\d+\] |[A-Z] [\d:.]+ executorch:)")

# What registers the kernels of operators that run outside of delegates, by their namespace.
_KERNELS = {
    "quantized_decomposed::": "executorch.kernels.quantized",
    "llama::": "executorch.extension.llm.custom_ops.custom_ops",
}


class Chatter:
    """What the runtime and its exporter wrote while they were held back."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def last(self) -> str:
        """Returns the kernel that the runtime did not find, or the last line of its log that reads like an error."""
        worth = [line for line in self.lines if not re.search(r"midr|cpus dont match|soc0", line)]
        missing = [line for line in worth if re.fullmatch(r"kernel '.*' not found\.", line)]
        return next(iter(missing or worth[-1:]), "").rstrip(".")


@contextmanager
def quiet() -> Iterator[Chatter]:
    """Holds back ExecuTorch's log lines, deprecation warnings and changes of the logging set-up.

    The C++ runtime writes to file descriptor 2, past Python, so the descriptor itself is redirected.
    Lines that are not the runtime's are written on when the block ends.
    """
    chatter = Chatter()
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), _held_stderr(chatter):
            warnings.simplefilter("ignore")
            yield chatter
    finally:
        logging.disable(disabled)
        root.handlers[:], root.level = handlers, level


@contextmanager
def _held_stderr(chatter: Chatter) -> Iterator[None]:
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # a process without standard error has nothing to hold back
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            _sort_lines(held.read(), chatter)


def _sort_lines(text: bytes, chatter: Chatter) -> None:
    for line in text.splitlines(keepends=True):
        if _RUNTIME_LINE.match(line):
            chatter.lines.append(_RUNTIME_LINE.sub(b"", line).decode(errors="replace").strip())
        else:
            sys.stderr.write(line.decode(errors="replace"))


class _ThreadPool:
    """The runtime's one thread pool, and how often it was replaced.

    A loaded XNNPACK method keeps a raw pointer to the pool. Replacing the pool leaves that pointer
    dangling, so every method loaded before must be loaded again: `generation` tells.
    """

    def __init__(self) -> None:
        self.generation = 0

    def resize(self, threads: int | None) -> int:
        """Gives the pool the number of threads (None: as it is); returns the pool's generation."""
        if threads is not None and threads != threads_of_pool():
            reset_pool(threads)
            self.generation += 1
        return self.generation


_POOL = _ThreadPool()


def check_threads(threads: int | None) -> None:
    """Raises a ConfigError if the value is no number of threads."""
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise ConfigError(f"threads is {threads!r}; pass a whole number of at least 1, or None for the runtime's own.")


def constants_of(buffer: bytes) -> dict[str, Any]:
    """Returns what the methods of a `.pte` return that take nothing: a number, or a list of them where there are more.

    Raises:
        LoweringError: the bytes are no program.
    """
    from executorch.runtime import Runtime

    found = {}
    with quiet():
        try:
            program = Runtime.get().load_program(buffer)
            for name in program.method_names:
                if program.metadata(name).num_inputs() == 0:
                    found[name] = list(program.load_method(name).execute([]))
        except (RuntimeError, ValueError) as error:
            raise LoweringError(f"The bytes are no program of ExecuTorch's ({first_line(error)}).") from error
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


class Method:
    """A `.pte`'s forward method in the runtime, loaded again whenever the thread pool was replaced.

    Args:
        content: the bytes of the program, or an open file of its own that has them and stays open: memory has room
            for other things then.
        threads: threads to run on, None for as many as the runtime chooses.

    Raises:
        LoweringError: the runtime does not load the program.
    """

    _method: Any

    def __init__(self, content: bytes | BinaryIO, threads: int | None = None) -> None:
        self._content = content
        self.threads = threads
        self.load()

    @property
    def buffer(self) -> bytes:
        """The bytes of the program."""
        if isinstance(self._content, bytes):
            return self._content
        self._content.seek(0)
        return self._content.read()

    @property
    def nbytes(self) -> int:
        """How many bytes the program has."""
        return len(self._content) if isinstance(self._content, bytes) else os.fstat(self._content.fileno()).st_size

    def unload(self) -> None:
        """Lets the loaded method go; the next call loads it again, and begins with the buffers of the model."""
        self._method = None

    def load(self) -> None:
        """Loads the method, which begins with the buffers that the model began with.

        Raises:
            LoweringError: the runtime does not load the program.
        """
        self._method = None  # its weights go before they come again
        with quiet() as chatter:
            failure = self._load()
        if failure:
            detail = chatter.last()
            raise LoweringError(
                f"The ExecuTorch runtime does not load the program: {failure}"
                f"{f' ({detail})' if detail else ''}; keep the operator it names float or report it."
            )

    def _load(self) -> str:
        from executorch.runtime import Runtime

        self._generation = _POOL.resize(self.threads)
        runtime = Runtime.get()
        try:
            self._register_kernels(runtime)
            self._method = runtime.load_program(self._loadable()).load_method("forward")
        except (RuntimeError, ValueError, ImportError) as error:
            return first_line(error)
        return ""

    def _loadable(self) -> bytes | Path:
        """Returns what the runtime reads: of a file it maps what it needs, and lets weights go that it has packed."""
        if isinstance(self._content, bytes) or not IS_HERE:
            return self.buffer
        return Path(f"/proc/self/fd/{self._content.fileno()}")

    def _register_kernels(self, runtime: Any) -> None:
        """Imports what has the kernels that run outside of delegates, each for the operators of one namespace."""
        registered = runtime.operator_registry.operator_names
        for namespace, module in _KERNELS.items():
            is_there = any(name.startswith(namespace) for name in registered)
            if not is_there and self._names(namespace.encode()):
                import_module(module)

    def _names(self, text: bytes) -> bool:
        """Tells whether the program has a text: it names its operators as they are."""
        if isinstance(self._content, bytes):
            return text in self._content
        with mmap.mmap(self._content.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the method on flat inputs and returns its flat outputs.

        Raises:
            LoweringError: the runtime refuses the inputs or fails while running.
        """
        if self._method is None or _POOL.resize(self.threads) != self._generation:
            self.load()
        try:
            return list(self._method.execute(inputs))
        except RuntimeError as error:
            shapes = [tuple(i.shape) if hasattr(i, "shape") else i for i in inputs]
            raise LoweringError(
                f"The ExecuTorch runtime fails on inputs of shapes {shapes}: {first_line(error)}; "
                "pass inputs as exported, or export with dynamic shapes."
            ) from error
