"""What a quantizer of a composition is shown after annotation: its own annotations and points, no others.

Before: a graph that several quantizers have annotated, or the observers that are to be inserted. After: what the
quantizer's own `validate` and callback made of their part.
"""

from collections.abc import MutableMapping
from typing import Any

from torch import fx
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.errors import AnnotationError, QuantplugError, first_line
from quantplug.core.graph.facts import describe
from quantplug.core.specs.decision import decision
from quantplug.quantizers.composition.members import Member


def validate_own(member: Member, model: fx.GraphModule) -> None:
    """Lets a quantizer validate what it annotated.

    Raises:
        AnnotationError: it refuses it; the sentence says which quantizer.
    """
    hidden = {n: n.meta.pop(Q_ANNOTATION_KEY) for n in _annotated(model.graph) if not _owns(member, n)}
    try:
        member.quantizer.validate(model)
    except QuantplugError:
        raise
    except Exception as error:
        raise AnnotationError(
            f"Quantizer '{member.name}' refuses the graph that it annotated: {first_line(error)}."
        ) from error
    finally:
        for node, annotation in hidden.items():
            node.meta[Q_ANNOTATION_KEY] = annotation


def adjust_own(member: Member, model: fx.GraphModule, observers: MutableMapping[Any, Any]) -> None:
    """Lets a quantizer adjust the observers at the points that it annotated.

    Raises:
        AnnotationError: it gives an observer to a point of another's.
    """
    own = {point: observer for point, observer in observers.items() if _owns(member, _holder(point))}
    before = dict(own)
    member.quantizer.prepare_obs_or_fq_callback(model, own)
    _take_over(member, before, own, observers)


def _annotated(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if Q_ANNOTATION_KEY in node.meta]


def _owns(member: Member, node: fx.Node) -> bool:
    decided = decision(node)
    return decided is not None and decided.owner == member.name


def _holder(point: Any) -> fx.Node:
    """Returns the node whose annotation names a point: the reader of an edge, or the node itself."""
    holder: fx.Node = point[1] if isinstance(point, tuple) else point
    return holder


def _take_over(
    member: Member, before: dict[Any, Any], after: dict[Any, Any], observers: MutableMapping[Any, Any]
) -> None:
    strange = next((point for point in after if point not in before and not _owns(member, _holder(point))), None)
    if strange is not None:
        raise AnnotationError(
            f"Quantizer '{member.name}' gives an observer to {describe(_holder(strange))}, which it did not annotate; "
            "let its callback change the points that it is given."
        )
    for point in before.keys() - after.keys():
        del observers[point]
    observers.update(after)
