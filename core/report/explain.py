"""The report: for every compute operator how it is quantized, or why not.

Before: an annotated, prepared or converted graph, from our quantizers or from anybody's. After: a value
with one row per compute operator, the float islands and the boundaries between integer and float, as a
text table, JSON or one HTML page.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import StringIO

import jinja2
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.batch_norms.inference import Folding
from quantplug.core.graph.facts import (
    attribute,
    compute_nodes,
    is_constant,
    module_path,
    require_graph_module,
)
from quantplug.core.graph.meta import CONFLICTS, FOLDINGS, NOTES, VIOLATIONS
from quantplug.core.graph.submodels import submodel_targets
from quantplug.core.graph.union_find import UnionFind
from quantplug.core.peers.torchao_names import is_marked
from quantplug.core.qdq.nodes import (
    is_dequantize,
    is_qdq,
    is_quantize,
    is_weight,
)
from quantplug.core.report.boundaries import Boundary, boundaries
from quantplug.core.report.engines import HEADINGS, EngineTimes
from quantplug.core.report.how import arrow, how_annotated, how_converted
from quantplug.core.report.page import PAGE
from quantplug.core.specs.decision import decision
from quantplug.core.specs.limits import Violation


@dataclass(frozen=True)
class Row:
    """One compute operator.

    Attributes:
        node: its name in the graph.
        operator: the operator, such as "conv2d".
        module_path: dotted path of the module it was traced in.
        quantized: whether its numbers are integers.
        rule: the rule that took it; "" for float, "annotated" for a quantizer without named rules.
        owner: the backend; "" if not known.
        how: dtypes, such as "int8, int8 per channel -> int8".
        config: the scope that chose the config, in words.
        reason: for a float operator the nearest rule and its first failing predicate.
        dtypes: the dtype config of the rule that it runs under; "" if the rule declares none.
        passed_over: the preferred dtype configs that did not fit, each with the reason.
    """

    node: str
    operator: str
    module_path: str
    quantized: bool
    rule: str
    owner: str
    how: str
    config: str
    reason: str
    dtypes: str = ""
    passed_over: str = ""

    @property
    def told(self) -> str:
        """How the operator is quantized, or why not, in one text."""
        if not self.quantized:
            return self.reason
        instead = f", not {self.passed_over}" if self.passed_over else ""
        return f"{self.how} as '{self.dtypes}'{instead}" if self.dtypes else self.how


@dataclass(frozen=True)
class Report:
    """What became of each operator of a graph.

    Attributes:
        stage: "exported", "prepared" or "converted".
        rows: one for each compute operator, in graph order.
        islands: for each connected group of float compute operators, their names.
        boundaries: in a converted graph, where numbers change their form or pass from one quantizer to another.
        violations: limits of the kernels that specs or calibrated numbers break; errors in strict mode.
        notes: what quantizers of a composition did to each other, and specs of one tensor that disagree.
        foldings: what prepare did with each batch norm.
        engines: how fast each engine runs the graph, where the fastest was chosen; else None.
    """

    stage: str
    rows: tuple[Row, ...]
    islands: tuple[tuple[str, ...], ...]
    boundaries: tuple[Boundary, ...]
    violations: tuple[Violation, ...] = ()
    notes: tuple[str, ...] = ()
    foldings: tuple[Folding, ...] = ()
    engines: EngineTimes | None = None

    @property
    def quantized(self) -> int:
        """Number of quantized compute operators."""
        return sum(row.quantized for row in self.rows)

    @property
    def owners(self) -> tuple[str, ...]:
        """The quantizers that quantize an operator, in graph order."""
        return tuple(dict.fromkeys(row.owner for row in self.rows if row.quantized and row.owner))

    def row(self, node: str) -> Row:
        """Returns the row of a node by its name; KeyError if the graph has no such compute operator."""
        return {row.node: row for row in self.rows}[node]

    def summary(self) -> str:
        """Returns the counts in one sentence."""
        return (
            f"{self.quantized} of {len(self.rows)} operators quantized, float islands: {len(self.islands)}, "
            f"boundaries between integer and float: {sum(b.kind != 'shared' for b in self.boundaries)}."
        )

    def text(self, width: int = 160) -> str:
        """Returns a table for the terminal, `width` characters wide."""
        out = StringIO()
        console = Console(file=out, width=width, no_color=True)
        console.print(self.table())
        if len(self.owners) > 1 and self.boundaries:
            console.print(self.boundary_table())
        for line in (*self.foldings, *self.violations, *self.notes):
            console.print(escape(f"{line}"))
        console.print(self.summary())
        if self.engines is not None:
            console.print(self.engine_table())
            console.print(escape(self.engines.summary()))
        return out.getvalue()

    def table(self) -> Table:
        """Returns the rows as a rich table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("node", "operator", "module", "rule", "how, or why it stays float"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            rule = f"{row.owner}: {row.rule}" if row.rule and len(self.owners) > 1 else row.rule
            cells = (row.node, row.operator, row.module_path, rule or "float", row.told)
            # Without it rich would read "[ab]" in a path or reason as markup and leave it out.
            table.add_row(*map(escape, cells))
        return table

    def engine_table(self) -> Table:
        """Returns the times of engines as a rich table; without rows where none were timed."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in HEADINGS:
            table.add_column(heading, overflow="fold")
        for row in self.engines.rows if self.engines else ():
            table.add_row(*map(escape, row.cells))
        return table

    def boundary_table(self) -> Table:
        """Returns the boundaries as a rich table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("boundary", "from", "to", "before", "after", "elements", "largest error"):
            table.add_column(heading, overflow="fold")
        for b in self.boundaries:
            source, readers = b.source or b.producer, ", ".join(b.readers or b.consumers)
            elements = "symbolic" if b.elements is None else str(b.elements)
            error = "not known" if b.error is None else f"{b.error:.3g}"
            table.add_row(*map(escape, (b.kind, source, readers, b.before, b.after, elements, error)))
        return table

    def json(self) -> str:
        """Returns the whole report as JSON; engines are in it where they were timed."""
        parts = asdict(self)
        if self.engines is None:
            del parts["engines"]
        return json.dumps({**parts, "quantized": self.quantized}, indent=1)

    def html(self, title: str = "Quantization report") -> str:
        """Returns one HTML page that needs nothing else."""
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(PAGE).render(report=self, title=title, headings=HEADINGS)

    def __str__(self) -> str:
        return self.text()


def explain(model: fx.GraphModule) -> Report:
    """Tells of every compute operator of a graph how it is quantized, or why not.

    Args:
        model: a graph that a quantizer annotated, prepare returned or convert returned; the quantizer
            may be anybody's. The graph is not changed.

    Raises:
        ModelError: the model is not an exported graph.
    """
    models = list(_with_submodels(require_graph_module(model, "explain")))
    graphs = [each.graph for each in models]
    stages = [_stage(graph) for graph in graphs]
    stage = next((found for found in ("converted", "prepared") if found in stages), "exported")
    parts = [_explain_graph(graph, stage) for graph in graphs]
    return Report(
        stage,
        rows=tuple(row for part in parts for row in part.rows),
        islands=tuple(island for part in parts for island in part.islands),
        boundaries=tuple(boundary for part in parts for boundary in part.boundaries),
        violations=tuple(violation for each in models for violation in VIOLATIONS.get(each, ())),
        foldings=tuple(folding for each in models for folding in FOLDINGS.get(each, ())),
        notes=tuple(note for each in models for told in (NOTES, CONFLICTS) for note in told.get(each, ())),
    )


def _with_submodels(model: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yields a model, then those of its control flow."""
    yield model
    for target in submodel_targets(model):
        yield from _with_submodels(attribute(model, target))


def _explain_graph(graph: fx.Graph, stage: str) -> Report:
    compute = [node for node in compute_nodes(graph) if not is_qdq(node)]
    quantized = {node for node in compute if (_in_integers(node) if stage == "converted" else _annotated(node))}
    rows = tuple(_row(node, node in quantized, stage) for node in compute)
    islands = _islands([node for node in compute if node not in quantized and not _on_constants(node)])
    return Report(stage, rows, islands, tuple(boundaries(graph, quantized)))


def _stage(graph: fx.Graph) -> str:
    if any(is_qdq(node) for node in graph.nodes):
        return "converted"
    called = (n.graph.owning_module and n.target for n in graph.nodes if n.op == "call_module")
    return "prepared" if any(str(target) != "_guards_fn" for target in called) else "exported"


def _annotated(node: fx.Node) -> bool:
    found = decision(node)
    if found is not None and found.quantized:
        return True
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    return isinstance(annotation, QuantizationAnnotation) and is_marked(annotation)


def _in_integers(node: fx.Node) -> bool:
    """Whether a converted graph computes a node between dequantize and quantize, alone or in a fused piece."""
    found = decision(node)
    if found is not None and found.quantized:
        return True
    fed = any(is_dequantize(source) and not is_weight(source) for source in node.all_input_nodes)
    weighted = any(is_weight(source) for source in node.all_input_nodes)
    if (fed or weighted) and _annotated(node):
        return True
    if found is not None or weighted:
        # Integer neighbours do not make a float operator an integer one.
        return found is None
    drained = any(is_quantize(user) for user in node.users)
    return (fed and drained) or (drained and _follows_weighted(node))


def _follows_weighted(node: fx.Node) -> bool:
    sources = [source for source in node.all_input_nodes if not is_constant(source)]
    return len(sources) == 1 and len(sources[0].users) == 1 and any(map(is_weight, sources[0].all_input_nodes))


def _on_constants(node: fx.Node) -> bool:
    return bool(node.all_input_nodes) and all(is_constant(source) for source in node.all_input_nodes)


def _row(node: fx.Node, quantized: bool, stage: str) -> Row:
    found = decision(node)
    told = how_converted if stage == "converted" else how_annotated
    return Row(
        node=node.name,
        operator=str(node.target).removeprefix("aten.").removesuffix(".default"),
        module_path=module_path(node),
        quantized=quantized,
        rule=(found.rule if found and found.rule else "annotated") if quantized else "",
        owner=found.owner if found else "",
        how=arrow(*told(node), into=found.root if found and found.root != node.name else "") if quantized else "",
        config=found.config if found else "",
        reason="" if quantized else _reason(node),
        dtypes=found.dtypes if found else "",
        passed_over=found.passed_over if found else "",
    )


def _reason(node: fx.Node) -> str:
    found = decision(node)
    return "no quantizer annotated it" if found is None else found.why


def _islands(nodes: list[fx.Node]) -> tuple[tuple[str, ...], ...]:
    """Connected groups of float nodes, in graph order."""
    connected = UnionFind(nodes)
    for node in nodes:
        for source in node.all_input_nodes:
            if source in connected:
                connected.join(source, node)
    return tuple(tuple(node.name for node in group) for group in connected.groups())
