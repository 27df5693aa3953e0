"""Embeddings: the table is quantized, the indices are not, the result is float."""

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.constraints import quantizes_weight
from quantplug.annotators.fusion import annotate_piece
from quantplug.annotators.qspecs import get_weight_qspec
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.graph.facts import operands, tensor_value
from quantplug.core.patterns.language import Match, constant, op
from quantplug.core.specs.dtypes import group_size


def embedding() -> Annotator:
    """Returns the annotator of embedding tables, for weight-only configs: a kernel looks rows up as integers."""

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        return annotate_piece(match, {match["w"]: get_weight_qspec(config)}, None)

    pattern = op("embedding", weight=constant("w"), name="op")
    return Annotator("embedding", (("embedding", pattern),), decide, (quantizes_weight,), output="float")


def half_or_groups(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds for configs that store tables in float16, or alone in groups of integers along each row."""
    if config.weight is not None and config.weight.dtype == torch.float16:
        return None
    if config.input_activation is None and group_size(config.weight) is not None:
        return None
    return "tables are stored in torch.float16 or in groups; give embedding the config 'int4_groups' or 'int8_groups'"


def rows_of_groups(match: Match, config: QuantizationConfig) -> str | None:
    """Holds unless the table "w" is quantized in groups that do not divide its rows."""
    size, table = group_size(config.weight), tensor_value(match["w"])
    if size is None or table is None or int(table.shape[-1]) % size == 0:
        return None
    return f"its rows of {int(table.shape[-1])} numbers are no multiple of the group of {size}"


def asked_at_each_call(match: Match, config: QuantizationConfig) -> str | None:
    """Holds unless the rows that are read are known at export, and integers would add error to constants."""
    if group_size(config.weight) is None:
        return None
    waiting, seen = [operands(match["op"])["indices"]], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            return None
        seen.add(node)
        waiting.extend(source for source in node.all_input_nodes if source not in seen)
    return "the rows that it reads are the same at each call, and rounding them would save nothing"


def table_of_groups() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns an embedding whose rows are groups, and its example inputs."""
    return nn.Embedding(11, 64), (torch.randint(0, 11, (2, 5)),)
