"""Names of nodes that outlive an export.

Before: a graph. After: for each node the module it was traced in, its operator, and its count among the same two,
such as "layer1.0.conv1:aten.conv2d.default#0"; inputs are named by their operand in the schema. Neither depends on
node names, which change when a model grows.
"""

from collections.abc import Iterator

from torch import fx

from quantplug.core.errors import AnnotationError
from quantplug.core.graph.facts import module_path, observer_of, operands
from quantplug.core.observers.sharing import Point


class Names:
    """Stable names of the nodes of one graph, and back.

    Attributes:
        nodes: the named nodes, in graph order: all but observers and the output.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._name: dict[fx.Node, str] = {}
        counts: dict[str, int] = {}
        for node in graph.nodes:
            if observer_of(node) is not None or node.op == "output":
                continue
            base = f"{module_path(node)}:{node.target}"
            counts[base] = counts.get(base, -1) + 1
            self._name[node] = f"{base}#{counts[base]}"
        self._node = {name: node for node, name in self._name.items()}
        self._by_node_name = {node.name: name for node, name in self._name.items()}
        self.nodes = list(self._name)

    def name(self, node: fx.Node) -> str:
        """Returns the stable name of a node."""
        return self._name[node]

    def name_of(self, node_name: str) -> str | None:
        """Returns the stable name of the node that the graph calls so."""
        return self._by_node_name.get(node_name)

    def point(self, point: Point) -> str:
        """Returns the stable name of an output, or of an input as "node<-operand"."""
        if isinstance(point, fx.Node):
            return self._name[point]
        source, user = point
        return f"{self._name[user]}<-{operand_of(source, user)}"

    def find_node(self, name: str) -> fx.Node | None:
        """Returns the node of a stable name."""
        return self._node.get(name)

    def find_point(self, text: str) -> Point:
        """Returns the point that `point` named."""
        name, _, operand = text.partition("<-")
        node = self._node[name]
        return (source_of(node, operand), node) if operand else node


def _operand_nodes(node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    for name, found in operands(node).items():
        many = found if isinstance(found, list | tuple) else None
        for position, value in enumerate(many if many is not None else (found,)):
            if isinstance(value, fx.Node):
                yield (f"{name}[{position}]" if many is not None else name), _behind_observers(value)


def _behind_observers(node: fx.Node) -> fx.Node:
    while observer_of(node) is not None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def operand_of(source: fx.Node, user: fx.Node) -> str:
    """Returns the operand by which a node reads another, observers apart."""
    return next(name for name, node in _operand_nodes(user) if node is source)


def source_of(node: fx.Node, operand: str) -> fx.Node:
    """Returns the node that an operand reads.

    Raises:
        AnnotationError: the node has no such operand.
    """
    found = dict(_operand_nodes(node)).get(operand)
    if found is None:
        raise AnnotationError(
            f"The plan quantizes operand '{operand}' of '{node.name}', which has none here; plan again."
        )
    return found
