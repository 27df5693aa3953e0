"""torchvision's models for benchmarks, on any build of torch."""

from types import ModuleType

import torch


def torchvision_models() -> ModuleType:
    """Imports torchvision's models, also where its compiled operators do not fit the torch that is installed."""
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        import torchvision
    found: ModuleType = torchvision.models
    return found
