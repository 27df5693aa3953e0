"""torch.ao's declarations and settings as ours: `BackendConfig` to a `Backend`, `QConfigMapping` to a quantizer.

The objects are read, never imported: torch.ao.quantization is deprecated, and nothing here needs it installed.
"""

from quantplug.quantizers.importer.backend_config import from_backend_config, import_backend_config
from quantplug.quantizers.importer.mapping import from_qconfig_mapping
from quantplug.quantizers.importer.qconfig import from_qconfig
from quantplug.quantizers.importer.report import ImportedPattern, ImportReport

__all__ = [
    "ImportReport",
    "ImportedPattern",
    "from_backend_config",
    "from_qconfig",
    "from_qconfig_mapping",
    "import_backend_config",
]
