"""Graph modules that compile their graph when somebody first needs its code.

Before: a graph that prepare or convert built. After: a graph module that generates and compiles the Python
code of its graph when it is first run, printed or pickled. Until then every pass may edit the graph and ask
for a new compilation, as passes do, and none is made: compiling takes longer than editing.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from quantplug.core.peers.torch_names import calling_structure


def _own_recompile() -> Any:
    """Returns torch's way to compile, also where `compiled_when_run` has put another one in its place."""
    return getattr(fx.GraphModule.recompile, "in_place_of", fx.GraphModule.recompile)


class _Compilation:
    """Stands for the `forward` of a graph module until it is asked for, of the module or of its class.

    Each graph module has a class of its own, where compiling puts the compiled function in place of this.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = weakref.ref(module)

    def __get__(self, module: fx.GraphModule | None, owner: type[fx.GraphModule]) -> Any:
        compiled = self._module()
        if compiled is None:
            raise AttributeError(f"The {owner.__name__} that this class was made for is gone, and its forward with it.")
        _own_recompile()(compiled)
        return owner.forward if module is None else module.forward


class LazyGraphModule(fx.GraphModule):
    """A graph module without code until the code is needed."""

    def recompile(self) -> Any:
        """Compiles the graph anew if it was compiled before; else that is still to come."""
        if self._is_compiled:
            return super().recompile()
        type(self).forward = _Compilation(self)  # type: ignore[assignment]
        return None

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        self._compile()
        return super().code

    def __str__(self) -> str:
        self._compile()
        return super().__str__()

    def __reduce__(self) -> Any:
        self._compile()
        return super().__reduce__()

    @property
    def _is_compiled(self) -> bool:
        return not isinstance(vars(type(self)).get("forward"), _Compilation | None)

    def _compile(self) -> None:
        if not self._is_compiled:
            _own_recompile()(self)


@contextmanager
def compiled_once(model: fx.GraphModule) -> Iterator[None]:
    """Lets a graph module compile its graph once, behind all passes that ask for it here; none of them may run it."""
    vars(model)["recompile"] = lambda: None
    try:
        yield
    finally:
        del vars(model)["recompile"]
        model.recompile()


@contextmanager
def compiled_when_run() -> Iterator[None]:
    """Lets every graph module wait with its code until it is run, inside of the block.

    Passes ask for code after each change, and torch keeps the text of each: an eighth of the time that lowering a
    language model took. Blocks may overlap, in threads: what the last one leaves is torch's own way.
    """
    own = _own_recompile()

    def wait(self: fx.GraphModule) -> None:
        called = calling_structure(self.graph)
        if called is not None:  # they stand beside the code
            self._in_spec, self._out_spec = called.in_spec, called.out_spec
        vars(self).setdefault("_code", "")  # for who only logs it
        type(self).forward = _Compilation(self)  # type: ignore[assignment]

    wait.in_place_of = own  # type: ignore[attr-defined]
    fx.GraphModule.recompile = wait  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        fx.GraphModule.recompile = own  # type: ignore[method-assign]
