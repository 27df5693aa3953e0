"""One rule of a backend under one config, through the whole flow.

Before: a backend's declaration. After: for each rule and config a `Trial`, whose stages (annotated, prepared,
converted, lowered) are made when they are first asked for, once for all forms of the rule side by side.
"""

import contextlib
import io
import tempfile
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.conformance.pieces import Batch, Piece, PieceError, Placed, neighbours
from quantplug.conformance.recipes import SAMPLES
from quantplug.conformance.spelling import Call, Operand, Spelling, spellings
from quantplug.core.annotator import Annotator
from quantplug.core.calibrated import qparam_violations
from quantplug.core.constants import constant_nodes
from quantplug.core.convert import convert_pt2e
from quantplug.core.decision import Decision, decision
from quantplug.core.errors import AnnotationError, ConfigError
from quantplug.core.graph import compute_nodes
from quantplug.core.limits import VIOLATIONS_KEY, Violation
from quantplug.core.pattern import Pattern, Value
from quantplug.core.plan import plan_of
from quantplug.core.prepare import prepare_pt2e, prepare_qat_pt2e
from quantplug.core.qdq import DEQUANTIZE_OPS, QUANTIZE_OPS
from quantplug.core.reference import differences
from quantplug.lowering.program import Program
from quantplug.quantizers.backend import Backend
from quantplug.quantizers.capabilities import configs_of
from quantplug.quantizers.quantizer import BackendQuantizer


@dataclass(frozen=True)
class Form:
    """One way in which a rule's pattern occurs.

    Attributes:
        name: the overload that the rule is about, and a number where several forms share it.
        placed: the module, or None where the kit could make none.
        problem: why it could make none.
    """

    name: str
    placed: Placed | None
    problem: str = ""


@dataclass
class Trial:
    """A rule under a config.

    Attributes:
        backend: the declaration.
        row: the annotator.
        label: the rule.
        config_name: the config.
        forms: the ways in which the rule's pattern occurs.
        kin: the trials of the same rule under every config.
    """

    backend: Backend
    row: Annotator
    label: str
    config_name: str
    forms: tuple[Form, ...]
    kin: list["Trial"] = field(default_factory=list, repr=False)

    @property
    def mode(self) -> str:
        """What the config is for: "static", "dynamic" or "weight_only"."""
        activation = self.backend.config(self.config_name).input_activation
        if activation is None:
            return "weight_only"
        return "dynamic" if activation.is_dynamic else "static"

    def name(self, index: int) -> str:
        """Returns the test name of one form, without the check."""
        parts = (self.backend.name, self.config_name, self.label, self.forms[index].name, self.mode)
        return "-".join(parts)

    @cached_property
    def is_qat(self) -> bool:
        """Whether the rule is for training: nothing of it is taken without, something is with it."""
        if any(self.ptq.takes(i) for i in range(len(self.forms))):
            return False
        return self.qat is not None and any(self.qat.takes(i) for i in range(len(self.forms)))

    @cached_property
    def ptq(self) -> "Flow":
        """The flow after training."""
        return Flow(self, self.backend.config(self.config_name), is_qat=False)

    @cached_property
    def qat(self) -> "Flow | None":
        """The flow of quantization-aware training, None where the config has none."""
        try:
            return Flow(self, self.backend.config(self.config_name, is_qat=True), is_qat=True)
        except ConfigError:
            return None

    @property
    def flow(self) -> "Flow":
        """The flow in which the rule applies."""
        return self.qat if self.is_qat and self.qat is not None else self.ptq

    def release(self) -> None:
        """Forgets the stages: hundreds of exported graphs at once would slow everything down."""
        for made in ("ptq", "qat", "alone"):
            self.__dict__.pop(made, None)

    @cached_property
    def alone(self) -> tuple["Trial", ...]:
        """The same rule with each form by itself, to tell which of them something is about."""
        return tuple(Trial(self.backend, self.row, self.label, self.config_name, (f,), self.kin) for f in self.forms)


class Flow:
    """The stages of one trial, each made once.

    Attributes:
        quantizer: a quantizer of the backend that reports broken limits instead of raising.
        inputs: of the model of all forms.
    """

    def __init__(self, trial: Trial, config: QuantizationConfig, *, is_qat: bool) -> None:
        self.trial, self.is_qat, self.config = trial, is_qat, config
        self.quantizer = quantizer_of(trial.backend, config)
        self.batch = Batch([form.placed for form in trial.forms if form.placed is not None]).eval()
        self.inputs = self.batch.inputs
        self._results: dict[tuple[str, bool, int], list[Tensor]] = {}
        self._constants: dict[fx.GraphModule, set[fx.Node]] = {}

    def exported(self) -> fx.GraphModule:
        """Returns a new export of the model."""
        return torch.export.export(self.batch, self.inputs).module()

    @cached_property
    def annotated(self) -> fx.GraphModule:
        """The graph with annotations, nothing inserted."""
        return self.annotate()

    def annotate(self) -> fx.GraphModule:
        """Returns a new annotated graph."""
        return self.quantizer.annotate(self.quantizer.transform_for_annotation(self.exported()))

    @cached_property
    def prepared(self) -> fx.GraphModule:
        """The calibrated graph."""
        return self.prepare()

    def prepare(self) -> fx.GraphModule:
        """Returns a new calibrated graph, in evaluation mode."""
        prepare = prepare_qat_pt2e if self.is_qat else prepare_pt2e
        prepared = prepare(self.exported(), self.quantizer)
        prepared.eval()
        with torch.no_grad():
            prepared(*self.inputs)
        return prepared

    @cached_property
    def converted(self) -> fx.GraphModule:
        """The q/dq graph."""
        return convert_pt2e(self.prepare())

    @cached_property
    def program(self) -> Program:
        """The lowered model."""
        return self.trial.backend.lower(self.converted, self.inputs)

    @cached_property
    def reloaded(self) -> Any:
        """The q/dq graph after it was saved and loaded."""
        written = io.BytesIO()
        torch.export.save(torch.export.export(self.converted, self.inputs), written)
        written.seek(0)
        return torch.export.load(written).module()

    @cached_property
    def artefact_bytes(self) -> int:
        """Bytes of the file that the program writes."""
        with tempfile.TemporaryDirectory() as folder:
            return self.program.save(Path(folder) / "artefact.pt2").stat().st_size

    @cached_property
    def again(self) -> tuple[str, ...]:
        """In what a second run over the same model differs from the first, in words."""
        plans = plan_of(self.annotate()).differences(plan_of(self.annotated))
        return (*plans, *differences(convert_pt2e(self.prepare()), self.converted))

    @cached_property
    def violations(self) -> tuple[Violation, ...]:
        """The declared limits that the config and the calibrated numbers break."""
        early = self.annotated.meta.get(VIOLATIONS_KEY, ())
        with contextlib.suppress(AnnotationError):  # what cannot be carried out has no numbers
            return (*early, *(broken for broken, _ in qparam_violations(self.converted)))
        return tuple(early)

    def results(self, stage: str, *, beyond: bool = False, run: int = 0) -> list[Tensor]:
        """Returns what each form yields at a stage, without what its neighbours make of it.

        Args:
            stage: "prepared", "converted", "reloaded" or "program".
            beyond: on inputs that leave the calibrated range instead of those that it was found on.
            run: a stage is run once for each number.
        """
        key = (stage, beyond, run)
        if key not in self._results:
            inputs = tuple(x * 1.25 if beyond and x.is_floating_point() else x.clone() for x in self.inputs)
            with torch.no_grad():
                found = getattr(self, stage)(*inputs)
            self._results[key] = [pytree.tree_leaves(result)[0] for result in found]
        return self._results[key]

    def root(self, model: fx.GraphModule, index: int) -> fx.Node:
        """Returns the last operator of a form."""
        return behind_conversions(self.output(model, index))

    def output(self, model: fx.GraphModule, index: int) -> fx.Node:
        """Returns the node that yields a form's result."""
        sizes = [placed.results for placed in self.batch.placed]
        leaves = pytree.tree_leaves(next(n for n in model.graph.nodes if n.op == "output").args)
        found = leaves[sum(sizes[:index])]
        assert isinstance(found, fx.Node)
        return found

    def operators(self, model: fx.GraphModule, index: int) -> list[fx.Node]:
        """Returns the compute operators that a form's result depends on, without those on constants."""
        if model not in self._constants:
            self._constants[model] = constant_nodes(model.graph)
        constants = self._constants[model]
        return [node for node in _upstream(self.root(model, index), constants) if _computes(node)]

    def takes(self, index: int) -> bool:
        """Tells whether the rule under trial takes a form."""
        decided = self.decided(index)
        return decided is not None and decided.rule == self.trial.label

    def decided(self, index: int) -> Decision | None:
        """Returns what was decided about the last operator of a form."""
        return decision(self.root(self.annotated, index))

    def is_rewritten(self, index: int) -> bool:
        """Tells whether the backend's own transforms replaced the form, and rules of it took what came."""
        placed = self.batch.placed[index]
        written = placed.piece.root.target if isinstance(placed.piece, Piece) else None
        found = self.operators(self.annotated, index)
        taken = all((decided := decision(node)) is not None and decided.quantized for node in found)
        return written is not None and taken and all(node.target is not written for node in found)


def behind_conversions(node: fx.Node) -> fx.Node:
    """Returns what a quantize/dequantize pair was put behind."""
    while node.target in (*QUANTIZE_OPS, *DEQUANTIZE_OPS):
        node = node.all_input_nodes[0]
    return node


def _upstream(root: fx.Node, constants: Set[fx.Node]) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        if node not in found and node not in constants:
            found[node] = None
            pending += node.all_input_nodes
    return found


def _computes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "quantized_decomposed"


def quantizer_of(backend: Backend, config: QuantizationConfig | str | None = None) -> BackendQuantizer:
    """Returns a quantizer of a declaration that reports broken limits instead of raising."""
    made: BackendQuantizer = type(f"{backend.name}Quantizer", (BackendQuantizer,), {"backend": backend})(strict=False)
    return made.set_global(config) if config is not None else made


def trials(backend: Backend, *rules: str) -> list[Trial]:
    """Returns a trial for each rule of a backend, or of those named, and each config under which it differs."""
    choose = Neighbours(backend)
    wanted = [(label, row) for row in backend.rows for label, _ in row.patterns if not rules or label in rules]
    rows = {(label, id(row)): row for label, row in wanted}
    return [trial for (label, _), row in rows.items() for trial in _of_rule(backend, row, label, choose)]


def _of_rule(backend: Backend, row: Annotator, label: str, choose: "Neighbours") -> list[Trial]:
    found: list[Trial] = []
    seen: list[Any] = []
    for name in configs_of(backend, row):
        asked = _asked(backend.config(name), row, label)
        if asked not in seen:
            seen.append(asked)
            found.append(Trial(backend, row, label, name, _forms(row, label, name, choose), found))
    return found


def _asked(config: QuantizationConfig, row: Annotator, label: str) -> tuple[Any, ...]:
    """What a rule reads of a config: one without constants gives the same annotations for any weight spec."""
    weighted = any(_has_constant(pattern) for name, pattern in row.patterns if name == label)
    weight = (config.weight, config.bias) if weighted else ()
    return (config.input_activation, config.output_activation, *weight)


def _has_constant(pattern: Pattern) -> bool:
    own = isinstance(pattern, Value) and pattern.kind == "a constant"
    return own or any(_has_constant(part) for part in pattern.parts)


def _forms(row: Annotator, label: str, config: str, choose: "Neighbours") -> tuple[Form, ...]:
    made = list(_shown(row)) or list(_written(row, label, config, choose))
    good = [form for form in made if form.placed is not None]
    if not good:
        problem = next((form.problem for form in made), "it has no spelling")
        return (Form("form", None, f"{problem}; show what the rule is about with .shown_by(function)."),)
    names = [form.name for form in good]
    return tuple(
        Form(n if names.count(n) == 1 else f"{n}-{names[: i + 1].count(n)}", good[i].placed)
        for i, n in enumerate(names)
    )


def _shown(row: Annotator) -> Iterator[Form]:
    for example in row.examples:
        module, inputs = example()
        yield Form(getattr(example, "__name__", "example").strip("<>"), Placed(module, inputs, frozenset()))


def _written(row: Annotator, label: str, config: str, choose: "Neighbours") -> Iterator[Form]:
    for pattern in (pattern for name, pattern in row.patterns if name == label):
        calls = [call for call in spellings(pattern) if isinstance(call, Call) and not _writes_input(call, row.follows)]
        for number in range(max(2, len(calls)) if calls else 0):
            call = calls[number % len(calls)]
            try:
                placed = _place(row, config, Piece(call, SAMPLES[number % len(SAMPLES)]), choose)
            except PieceError as error:
                yield Form(_operator(call), None, str(error).rstrip("."))
            else:
                yield Form(_operator(call), placed)


def _writes_input(spelling: Spelling, follows: tuple[str, ...]) -> bool:
    """Tells whether an operator changes an input of the model in place, which is the caller's tensor."""
    if not isinstance(spelling, Call):
        return False
    schema = getattr(spelling.target, "_schema", None)
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write} if schema else set()
    own = any(
        name in written and isinstance(part, Operand) and part.kind == "a tensor" and part.name not in follows
        for name, part in spelling.operands
    )
    return own or any(_writes_input(part, follows) for _, part in spelling.operands if part is not None)


def _operator(call: Call) -> str:
    """Returns the overload that the pattern binds to "op"."""
    found = next((c for c in _calls(call) if c.name == "op"), call)
    return str(found.target)


def _calls(call: Call) -> Iterator[Call]:
    yield call
    for _, part in call.operands:
        if isinstance(part, Call):
            yield from _calls(part)


def _place(row: Annotator, config: str, piece: Piece, choose: "Neighbours") -> Placed:
    """Puts a piece between the neighbours that its rule asks for."""
    followed = frozenset(piece.captures[name] for name in row.follows if name in piece.captures)
    inputs = tuple(piece.inputs)
    before = choose(config, inputs[min(followed)]) if followed else None
    with torch.no_grad():
        result = piece(*(x.clone() for x in inputs))
    after = choose(config, result) if row.writes_float else None
    return Placed(piece, inputs, followed, before, after)


class Neighbours:
    """Chooses modules that keep a shape and that a backend quantizes, input and output."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[tuple[str, tuple[int, ...]], nn.Module | None] = {}

    def __call__(self, config: str, x: Tensor) -> nn.Module | None:
        """Returns a module for tensors like this one, None where the backend quantizes none that the kit knows."""
        key = (config, tuple(x.shape))
        if key not in self._known:
            self._known[key] = next((m for m in neighbours(key[1]) if self._quantizes(config, m, x)), None)
        return self._known[key]

    def _quantizes(self, config: str, module: nn.Module, x: Tensor) -> bool:
        pair = nn.Sequential(module, module)
        model = torch.export.export(pair, (x,)).module()
        quantizer_of(self._backend, config).annotate(model)
        taken = [decision(node) for node in compute_nodes(model.graph)]
        return all(decided is not None and decided.quantized for decided in taken)
