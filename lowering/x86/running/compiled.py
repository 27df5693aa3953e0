"""The lowered graph through inductor: `torch.compile`, and an ahead-of-time package.

Before: the portable graph. After: C++ around the same oneDNN kernels; what lies between them (conversions,
activations, normalizations) is fused into loops.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from quantplug.core.errors import ArtefactError, LoweringError
from quantplug.core.files.whole import kind_at
from quantplug.core.graph.calling import in_order
from quantplug.core.peers.torch_names import inductor
from quantplug.lowering.signature import Signature
from quantplug.lowering.x86.running.inductor import FuseSums, Shield

DESCRIPTION = "quantplug"  # of what torch keeps for whoever makes a package


def options() -> dict[str, Any]:
    """Returns inductor's options: constants folded (so weights are packed when compiling), sums fused by us alone."""
    return {"freezing": True, "joint_custom_post_pass": Shield(), "post_grad_custom_post_pass": FuseSums()}


def package_options() -> dict[str, Any]:
    """Returns inductor's options for a package, whose weights lie where kernels load them fastest.

    torch 2.13's packages copy their weights into what `malloc` gives (`RAII_cpuMalloc` of `aoti_runtime/model_base.h`),
    which for large memory begins 16 bytes into a page: every vector that a kernel loads crosses two cache lines. There
    is no option for it, but the text of C declarations that inductor writes into the library (meant for operators with
    shims of their own) may define a function: a `malloc` that only this library sees and that aligns what it gives. On
    an Intel Xeon with AMX packages take 0.7 to 0.97 of the time.
    """
    declared = {"aot_inductor.custom_ops_to_c_shims": {torch.ops.onednn.qlinear_prepack.default: [_ALIGNED]}}
    return {**options(), **(declared if sys.platform == "linux" else {})}


_ALIGNED = """
void* malloc(size_t size) noexcept {
    __asm__(".hidden malloc");
    return aligned_alloc(64, size);
}
"""


def require_compiler() -> None:
    """Checks that inductor finds a C++ compiler.

    Raises:
        LoweringError: there is none.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise LoweringError(
            f"Compiling needs a C++ compiler and '{compiler}' is not on PATH; "
            "install g++, or run the program eagerly, which needs none."
        )


def compiled(module: fx.GraphModule, signature: Signature) -> Callable[..., Any]:
    """Returns the module under `torch.compile`; the first call compiles.

    Args:
        module: the lowered graph.
        signature: what it takes; inductor itself would compile it again for other inputs, and it would be wrong.

    Raises:
        LoweringError: there is no C++ compiler.
    """
    require_compiler()
    run = torch.compile(module)

    def call(*inputs: Any, **keywords: Any) -> Any:
        inputs = in_order(signature.names, inputs, keywords)
        signature.flatten(inputs)
        # Dynamo too reads the freezing option, and constants are frozen only where autograd is off,
        # so both hold around every call that may compile.
        with inductor().config.patch(options()), torch.no_grad():
            return run(*inputs)

    return call


def package(exported: torch.export.ExportedProgram, path: Path, described: str) -> Path:
    """Writes an AOTInductor package; `torch._inductor.aoti_load_package(path)` runs it without this package.

    Args:
        exported: the program.
        path: the file.
        described: what the package says of itself, beside what torch writes.

    Raises:
        ArtefactError: the folder does not exist or the name does not end in .pt2.
        LoweringError: there is no C++ compiler.
    """
    if path.suffix != ".pt2" or kind_at(path.parent) != "folder":
        raise ArtefactError(
            f"Cannot write a package to '{path}'; pass a name that ends in '.pt2' in an existing folder."
        )
    require_compiler()
    with torch.no_grad():
        written = inductor().aoti_compile_and_package(
            exported,
            package_path=str(path),
            inductor_configs={**package_options(), "aot_inductor.metadata": {DESCRIPTION: described}},
        )
    return Path(str(written))
