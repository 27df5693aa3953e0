"""Engines of the tests' own: each notes that it was asked, and some are wrong, slow, broken or far too fast."""

import time

import torch
from torch.utils import _pytree as pytree

from quantplug.core.errors import LoweringError
from quantplug.lowering.program import Program
from quantplug.lowering.reference import lower as lower_to_reference
from quantplug.lowering.x86 import lower as lower_to_onednn

ASKED: list[str] = []


def honest(converted, example_inputs, *, dynamic_shapes=None, float_dtype=torch.float32):
    """oneDNN's lowering as it is."""
    ASKED.append("honest")
    return lower_to_onednn(converted, example_inputs, dynamic_shapes=dynamic_shapes, float_dtype=float_dtype)


class Slow(Program):
    def __init__(self, inner, seconds):
        self.inner, self.seconds, self.ops = inner, seconds, inner.ops

    def __call__(self, *inputs, **keywords):
        time.sleep(self.seconds)
        return self.inner(*inputs, **keywords)

    def save(self, path):
        return self.inner.save(path)

    @property
    def nbytes(self):
        return self.inner.nbytes


def slow(converted, example_inputs, *, dynamic_shapes=None):
    """Right, and ten milliseconds late."""
    ASKED.append("slow")
    return Slow(lower_to_reference(converted, example_inputs), 0.01)


class Wrong(Slow):
    """Right in its first call, and fast, but a tenth too large from then on."""

    def __call__(self, *inputs, **keywords):
        if not hasattr(self, "kept"):
            self.kept = self.inner(*inputs, **keywords)
            return self.kept
        return pytree.tree_map(lambda kept: 1.1 * kept, self.kept)


def wrong(converted, example_inputs, *, dynamic_shapes=None):
    ASKED.append("wrong")
    return Wrong(lower_to_reference(converted, example_inputs), 0)


def broken(converted, example_inputs, *, dynamic_shapes=None):
    ASKED.append("broken")
    raise RuntimeError("a library of the engine fell over\nat line 7")


def refusing(converted, example_inputs, *, dynamic_shapes=None):
    ASKED.append("refusing")
    raise LoweringError("This engine has no convolutions; keep them float.")
