"""The conformance kit over the quantizers of others and of ours: what each annotates, and what does not hold.

`python benchmarks/quantizers.py run FOLDER` tries each and writes what it found into a folder, `python
benchmarks/quantizers.py table FOLDER` prints the tables of docs/kit-findings.md. The factories below are what
`pytest --quantplug-quantizer quantizers:executorch_xnnpack` takes where this folder is on the path.
"""

import argparse
import json
import logging
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.conformance import Candidate, judging_of


def executorch_xnnpack() -> Quantizer:
    """Returns ExecuTorch's XNNPACKQuantizer with a scale for each channel."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))


def executorch_xnnpack_partitioner() -> Any:
    """Returns the partitioner that goes with it."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return XnnpackPartitioner()


def torchao_x86() -> Quantizer:
    """Returns torchao's X86InductorQuantizer in its default config."""
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())


def executorch_arm() -> Quantizer:
    """Returns ExecuTorch's EthosUQuantizer for an Ethos-U55."""
    from executorch.backends.arm.ethosu import EthosUCompileSpec
    from executorch.backends.arm.quantizer.arm_quantizer import EthosUQuantizer, get_symmetric_quantization_config

    return EthosUQuantizer(EthosUCompileSpec("ethos-u55-128")).set_global(get_symmetric_quantization_config())


def executorch_cortex_m() -> Quantizer:
    """Returns ExecuTorch's CortexMQuantizer, whose passes have to be imported first."""
    from executorch.backends.cortex_m import passes  # noqa: F401
    from executorch.backends.cortex_m.quantizer.quantizer import CortexMQuantizer

    return CortexMQuantizer()


def quantplug_xnnpack() -> Quantizer:
    """Returns our XNNPACKQuantizer in int8."""
    from quantplug.quantizers.xnnpack import XNNPACKQuantizer

    return XNNPACKQuantizer(strict=False).set_global("int8")


def quantplug_x86() -> Quantizer:
    """Returns our X86Quantizer in int8."""
    from quantplug.quantizers.x86 import X86Quantizer

    return X86Quantizer(strict=False).set_global("int8")


def lower_to_xnnpack(converted: Any, inputs: Any) -> Any:
    """Lowers a q/dq graph by quantplug's own way to XNNPACK."""
    from quantplug.lowering.xnnpack import lower

    return lower(converted, inputs)


HERE = "quantizers"
QUANTIZERS: dict[str, dict[str, Any]] = {
    "ExecuTorch XNNPACKQuantizer, XnnpackPartitioner": {
        "quantizer": f"{HERE}:executorch_xnnpack",
        "partitioners": (f"{HERE}:executorch_xnnpack_partitioner",),
    },
    "torchao X86InductorQuantizer": {"quantizer": f"{HERE}:torchao_x86"},
    "ExecuTorch EthosUQuantizer": {"quantizer": f"{HERE}:executorch_arm"},
    "ExecuTorch CortexMQuantizer": {"quantizer": f"{HERE}:executorch_cortex_m"},
    "quantplug XNNPACKQuantizer, its lowering": {
        "quantizer": f"{HERE}:quantplug_xnnpack",
        "lowering": f"{HERE}:lower_to_xnnpack",
    },
    "quantplug X86Quantizer": {"quantizer": f"{HERE}:quantplug_x86"},
}


# A few of the usual ones; `--all` tries what the kit knows, which takes forty times as long.
OPERATORS = ("linear", "conv2d", "add", "cat", "max_pool2d", "conv2d.padding-relu")


def judged(name: str, operators: tuple[str, ...]) -> dict[str, Any]:
    """Returns what the kit finds of one of the quantizers."""
    start = time.perf_counter()
    names = QUANTIZERS[name]
    trials, checks, judge = judging_of(Candidate.named(**names), *operators)
    found, last = [], trials[0].panel
    for trial in trials:
        if trial.panel is not last:
            last.release()
            last = trial.panel
        for check in checks:
            verdict = judge(trial, check)
            found.append((trial.form.row, trial.form.name, check, verdict.status, verdict.reason))
    last.release()
    return {"name": name, "seconds": time.perf_counter() - start, "found": found}


def run(folder: Path, wanted: list[str], operators: tuple[str, ...]) -> None:
    """Writes a file for each quantizer whose name contains one of the texts; for all of them without texts."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in QUANTIZERS:
        if not wanted or any(text.lower() in name.lower() for text in wanted):
            path = folder / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
            path.write_text(json.dumps(judged(name, operators), indent=0))
            print(f"wrote {path}", flush=True)


def table(folder: Path) -> Iterator[str]:
    """Yields the lines of the tables, a quantizer each in the order of `QUANTIZERS`."""
    files = {found["name"]: found for path in folder.glob("*.json") for found in [json.loads(path.read_text())]}
    yield "| quantizer | operators | forms | passed | failed | failed checks |"
    yield "|---|---|---|---|---|---|"
    ordered = [files[name] for name in QUANTIZERS if name in files]
    for one in ordered:
        failed = [entry for entry in one["found"] if entry[3] == "failed"]
        statuses = Counter(entry[3] for entry in one["found"])
        kinds = ", ".join(f"{check} {n}" for check, n in Counter(entry[2] for entry in failed).most_common()) or "none"
        operators, forms = ({entry[i] for entry in one["found"]} for i in (0, 1))
        cells = (one["name"], len(operators), len(forms), statuses["passed"], statuses["failed"], kinds)
        yield f"| {' | '.join(map(str, cells))} |"
    for one in (one for one in ordered if any(entry[3] == "failed" for entry in one["found"])):
        yield from ("", f"{one['name']}:", "")
        groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for _, form, check, status, reason in one["found"]:
            if status == "failed":
                key = (check, re.sub(r"'[^']*'|[\d.e-]+", "#", reason)[:90])
                groups.setdefault(key, []).append((form, reason))
        for (check, _), cases in sorted(groups.items(), key=lambda pair: -len(pair[1])):
            yield f"- {check}, {len(cases)}: {cases[0][1][:200]} ({', '.join(form for form, _ in cases[:4])})"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="texts in the names of the quantizers to run")
    parser.add_argument("--all", action="store_true", help="try every operator that the kit knows")
    given = parser.parse_args()
    if given.what == "table":
        print("\n".join(table(given.folder)))
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    run(given.folder, given.names, () if given.all else OPERATORS)


if __name__ == "__main__":
    main()
