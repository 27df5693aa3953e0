"""What the machine's kernels or a phone's can run: the union of x86 and XNNPACK, for one model on both.

The q/dq graph is the artefact; the rows of x86 come first.
"""

from quantplug.quantizers.framework.derived import union
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.x86 import X86
from quantplug.quantizers.xnnpack import XNNPACK

NATIVE = union(
    "native",
    X86,
    XNNPACK,
    summary="q/dq graphs of everything that x86 or XNNPACK kernels run",
    lowering="quantplug.lowering.reference:lower",
)


class NativeQuantizer(BackendQuantizer):
    """Quantizes what x86 or XNNPACK kernels can run."""

    backend = NATIVE
