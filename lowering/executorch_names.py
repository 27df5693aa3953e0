"""Private names of ExecuTorch that we use, each with why, and what would take its place.

Before: ExecuTorch is installed. After: what the targets call. ExecuTorch is imported by the calls, as it takes seconds.
"""

from collections.abc import Iterable
from typing import Any

# Another version may rename or mend what stands here: look at each name again, then set it.
WRITTEN_FOR = (1, 4)


def threads_of_pool() -> int:
    """Returns how many threads the runtime's pool has; the runtime has no public way to ask."""
    from executorch.extension.pybindings.portable_lib import _threadpool_get_thread_count

    return int(_threadpool_get_thread_count())


def reset_pool(threads: int) -> None:
    """Replaces the runtime's pool by one of so many threads; a setting of the runtime's or of a program's would do."""
    from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool

    _unsafe_reset_threadpool(threads)


def folding_pass() -> Any:
    """Returns the pass of Arm's backends that takes q/dq nodes into operators.

    The passes of Cortex-M import it from there too; an export of it from `executorch.backends.cortex_m` would do.
    """
    from executorch.backends.arm._passes import FoldAndAnnotateQParamsPass

    return FoldAndAnnotateQParamsPass


def telling_partitioner(spec: Any, said: dict[Any, str]) -> Any:
    """Returns Arm's partitioner for TOSA, which also says why it leaves a node out.

    It tells a reporter of its own, that it logs as a table; a public way to read that would do.

    Args:
        spec: the compile spec.
        said: gets the reason for each node that is left out.
    """
    from executorch.backends.arm.tosa.partitioner import TOSAPartitioner

    class Telling(TOSAPartitioner):
        def _create_operator_support(self, containing_program: Any, reporter: Any) -> Any:
            report = reporter.report_reject

            def noted(node: Any, reason: str) -> None:
                said.setdefault(node, reason)
                report(node, reason)

            reporter.report_reject = noted
            return super()._create_operator_support(containing_program, reporter)

    return Telling(spec)


def passes_of_delegates() -> tuple[Any, str]:
    """Returns where XNNPACK's serializer looks up the passes that it runs over a delegate, and their name there.

    An option of the partitioner that names the passes would do.
    """
    from executorch.backends.xnnpack import xnnpack_preprocess

    return xnnpack_preprocess, "XNNPACKPassManager"


def unchecked(preserved: Iterable[Any]) -> Any:
    """Returns the settings of an edge program whose operators are none of the edge dialect's.

    The switch has no public name; a dialect that takes operators of int8 would do.
    """
    from executorch.exir import EdgeCompileConfig

    return EdgeCompileConfig(_check_ir_validity=False, preserve_ops=list(preserved))


def edge_operator(name: str, space: str = "aten") -> Any:
    """Returns an operator of the edge dialect by its name, such as "index_put_"; they have no public module."""
    from executorch.exir.dialects._ops import ops

    return getattr(getattr(ops.edge, space), name).default


def attention_operator() -> Any:
    """Returns ExecuTorch's attention to a cache, whose library registers it and its kernel when it is imported.

    The module is public and its operators are not, but for the programs that hold them; a function beside would do.
    """
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401
    import torch

    return torch.ops.llama.custom_sdpa.default
