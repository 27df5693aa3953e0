"""Models that remember: each writes buffers in another way, and is called with `(batch, FEATURES)` tensors."""

import torch
import torch.nn.functional as F
from torch import nn

FEATURES = 16


class Cache(nn.Module):
    """A window over the last inputs, read through the linear's quantize node before it is written."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4 * FEATURES, 8)
        self.past: torch.Tensor
        self.register_buffer("past", torch.zeros(3, FEATURES))

    def forward(self, x):
        window = torch.cat([self.past, x])
        self.past.copy_(window[1:])
        return self.linear(window.reshape(1, -1))


class Average(nn.Module):
    """A chain of updates in place, whose result is read and whose buffer is read as well."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 8)
        self.register_buffer("mean", torch.zeros(1, FEATURES))

    def forward(self, x):
        mean = self.mean.mul_(0.5).add_(0.5 * x)
        return self.linear(x - mean) + self.mean.sum()


class Counter(nn.Module):
    """An integer that counts calls, returned beside the result."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 8)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls, self.calls.clone()


class Slots(nn.Module):
    """A key-value cache: rows of a table are filled at a position that moves on."""

    def __init__(self):
        super().__init__()
        self.key, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 8)
        self.keys: torch.Tensor
        self.position: torch.Tensor
        self.register_buffer("keys", torch.zeros(6, FEATURES))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.keys.index_copy_(0, self.position, self.key(x))
        self.position.add_(1)
        return self.out(torch.softmax(x @ self.keys.t(), -1) @ self.keys)


class Sliced(nn.Module):
    """A slice is assigned, and the whole buffer is rolled."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(FEATURES, 8, 3), nn.Linear(24, 8)
        self.register_buffer("line", torch.zeros(1, FEATURES, 5))

    def forward(self, x):
        self.line[:, :, :-1] = self.line[:, :, 1:].clone()
        self.line[:, :, -1] = x
        return self.head(F.relu(self.conv(self.line)).flatten(1))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(1, FEATURES))

    def forward(self, x):
        before = self.last.clone()
        self.last.copy_(x)
        return before


class Nested(nn.Module):
    """State in a submodule, read before and after the write, under no_grad."""

    def __init__(self):
        super().__init__()
        self.inner, self.linear = Inner(), nn.Linear(FEATURES, 8)

    def forward(self, x):
        with torch.no_grad():
            before = self.inner(x)
        return self.linear(x - before) + self.linear(self.inner.last)


class Masked(nn.Module):
    """A buffer that is filled by a mask and multiplied, then compared."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.peak: torch.Tensor
        self.register_buffer("peak", torch.full((1, FEATURES), -1.0))

    def forward(self, x):
        y = self.linear(x)
        self.peak.copy_(torch.maximum(self.peak * 0.9, y))
        self.peak.masked_fill_(self.peak > 2, 2.0)
        return y / (self.peak.abs() + 1)


class Delayed(nn.Module):
    """One buffer takes what another one was, and two change places."""

    last: torch.Tensor
    older: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def __init__(self):
        super().__init__()
        self.read, self.linear = nn.Linear(FEATURES, FEATURES), nn.Linear(4 * FEATURES, 8)
        for name in ("last", "older", "left", "right"):
            self.register_buffer(name, torch.zeros(1, FEATURES))

    def forward(self, x):
        y = self.read(x)
        self.older.copy_(self.last)
        self.last.copy_(y)
        held = self.left.clone()
        self.left.copy_(self.right)
        self.right.copy_(held + y)
        return self.linear(torch.cat([self.last, self.older, self.left, self.right], 1))


class Recurrent(nn.Module):
    """A hidden state that goes through a linear of its own."""

    def __init__(self):
        super().__init__()
        self.read, self.keep = nn.Linear(FEATURES, 8), nn.Linear(8, 8)
        self.register_buffer("hidden", torch.zeros(1, 8))

    def forward(self, x):
        hidden = torch.tanh(self.read(x) + self.keep(self.hidden))
        self.hidden.copy_(hidden)
        return hidden


class Gated(nn.Module):
    """A cell of gates, which export takes apart."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(FEATURES, 12), nn.Linear(12, 8)
        self.register_buffer("hidden", torch.zeros(1, 12))

    def forward(self, x):
        self.hidden.copy_(self.cell(x, self.hidden))
        return self.head(self.hidden)


MODELS = (Cache, Average, Counter, Slots, Sliced, Nested, Masked, Delayed, Recurrent, Gated)


def build(kind):
    torch.manual_seed(0)
    return kind().eval()


def calls(count, seed=1):
    """Inputs that grow from call to call, so that a state that stands still is seen."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, FEATURES, generator=generator) * (1 + 0.3 * i) for i in range(count)]
