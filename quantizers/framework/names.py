"""The names of backends, without importing one: what the registry loads from, and what a shell completes.

Before: nothing. After: for each name where its quantizer is; the entry points of installed packages.
"""

from importlib.metadata import EntryPoint, entry_points

GROUP = "quantplug.backends"
BUILT_IN = {
    "xnnpack": "quantplug.quantizers.xnnpack:XNNPACKQuantizer",
    "x86": "quantplug.quantizers.x86:X86Quantizer",
    "openvino": "quantplug.quantizers.openvino:OpenVINOQuantizer",
    "onnxruntime": "quantplug.quantizers.onnxruntime:ONNXRuntimeQuantizer",
    "native": "quantplug.quantizers.native:NativeQuantizer",
    "tensorrt": "quantplug.quantizers.tensorrt:TensorRTQuantizer",
    "cortex_m": "quantplug.quantizers.cortex_m:CortexMQuantizer",
    "arm": "quantplug.quantizers.arm:ArmQuantizer",
    "embedding": "quantplug.quantizers.embedding:EmbeddingQuantizer",
}


def points() -> tuple[EntryPoint, ...]:
    """Returns an entry point for each backend that is announced: the built-in ones, then those of packages."""
    own = (EntryPoint(name, where, GROUP) for name, where in BUILT_IN.items())
    return (*own, *entry_points(group=GROUP))


def names() -> list[str]:
    """Returns the names that are announced, each once; whether one can be imported is not known yet."""
    return list(dict.fromkeys(point.name for point in points()))
