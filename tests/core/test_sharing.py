"""Sharing groups against a slow literal reading of torchao's rules."""

import itertools
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.observers.sharing import annotated_specs, concrete_specs, sharing_groups, tensor_key

SPECS = tuple(
    QuantizationSpec(dtype, MinMaxObserver, qscheme=torch.per_tensor_affine) for dtype in (torch.int8, torch.uint8)
)


class Web(nn.Module):
    def __init__(self, edges: list[tuple[int, int]]) -> None:
        super().__init__()
        self.edges = edges

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for first, second in self.edges:
            values.append(values[first % len(values)] + values[second % len(values)])
        return values[-1]


def literal_groups(graph: fx.Graph) -> set[frozenset[Any]]:
    """Joins every pair of points that shares, until nothing changes."""
    specs = annotated_specs(graph)
    concrete = concrete_specs(specs)
    groups = [{point} for point in specs]

    def share(one: Any, other: Any) -> bool:
        if any(
            isinstance(specs[a], SharedQuantizationSpec) and specs[a].edge_or_node == b
            for a, b in ((one, other), (other, one))
        ):
            return True
        tensors = [point[0] if isinstance(point, tuple) else point for point in (one, other)]
        allowed = [isinstance(p, tuple) and p[1].meta[Q_ANNOTATION_KEY].allow_implicit_sharing for p in (one, other)]
        return tensors[0] is tensors[1] and any(allowed) and tensor_key(concrete[one]) == tensor_key(concrete[other])

    changed = True
    while changed:
        changed = False
        for first, second in itertools.combinations(groups, 2):
            if any(share(one, other) for one in first for other in second):
                first.update(second)
                groups.remove(second)
                changed = True
                break
    return {frozenset(group) for group in groups}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    edges=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6),
    choices=st.lists(st.integers(0, 5), min_size=40, max_size=40),
)
def test_q09_groups_are_the_closure_of_both_rules(edges: list[tuple[int, int]], choices: list[int]) -> None:
    graph = fx.symbolic_trace(Web(edges)).graph
    numbers = iter(choices)
    earlier: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        inputs: dict[fx.Node, Any] = {}
        for producer in node.all_input_nodes:
            number = next(numbers)
            # Only points that exist already are referred to, so there is no cycle.
            inputs[producer] = SPECS[number % 2] if number < 4 or not earlier else SharedQuantizationSpec(earlier[-1])
            earlier.append((producer, node))
        number = next(numbers)
        output = None if number == 0 else SPECS[number % 2] if number < 4 else SharedQuantizationSpec(earlier[-1])
        if output is not None:
            earlier.append(node)
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs, output, next(numbers) > 0)
    sharing = sharing_groups(graph)
    assert {frozenset(group.members) for group in sharing.groups} == literal_groups(graph)
    assert sharing_groups(graph) == sharing


def test_a_chain_of_ten_thousand_shared_points_is_followed() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    for _ in range(10_000):
        previous, node = node, graph.call_function(torch.relu, (node,))
        shared = SPECS[0] if previous.op == "placeholder" else SharedQuantizationSpec(previous)
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
            {previous: shared}, SharedQuantizationSpec((previous, node))
        )
    assert len(sharing_groups(graph).groups) == 1
