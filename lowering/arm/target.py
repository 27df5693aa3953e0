"""What a program is lowered for: an NPU by its name, or TOSA alone."""

from dataclasses import dataclass
from typing import Any

from quantplug.core.errors import ConfigError, LoweringError, did_you_mean

TOSA = "tosa"
# What the reference model and Ethos-U take beside 8 bits: activations of 16, weights of 4.
_PROFILE = "TOSA-1.0+INT+int16+int4"


@dataclass(frozen=True)
class Target:
    """A target and how ExecuTorch calls it.

    Attributes:
        name: an NPU such as "ethos-u55-128", or "tosa".
        tosa: the compile spec of its TOSA graphs.
        npu: the compile spec of the NPU; None for "tosa".
    """

    name: str
    tosa: Any
    npu: Any = None


def target_of(name: str) -> Target:
    """Returns a target by its name.

    Raises:
        ConfigError: there is no such target.
        LoweringError: a package is not installed.
    """
    try:
        import tosa_reference_model  # noqa: F401
        from ethosu.vela.architecture_features import Accelerator
        from executorch.backends.arm.ethosu import EthosUCompileSpec
        from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
    except ImportError as error:
        raise LoweringError(
            f"Lowering to Arm needs a package that is missing ({error}); pip install 'quantplug[arm]'."
        ) from error
    known = [TOSA, *Accelerator.member_list()]
    if name not in known:
        raise ConfigError(f"There is no target '{name}'{did_you_mean(name, known)}; choose one of {known}.")
    npu = None if name == TOSA else EthosUCompileSpec(name)
    return Target(name, _with_tables(TosaCompileSpec(_PROFILE if npu is None else npu.tosa_spec)), npu)


def _with_tables(spec: Any) -> Any:
    """Lets functions of one tensor be tables: ExecuTorch (1.4) writes leaky relu as three operators by default."""
    from executorch.backends.arm.common.pipeline_config import ArmPassPipelineConfig, LeakyReLULoweringConfig

    spec.set_pass_pipeline_config(ArmPassPipelineConfig(leaky_relu=LeakyReLULoweringConfig.TABLE))
    return spec
