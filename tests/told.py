"""What a report and a program tell of the same operators."""


def told(artefact):
    """Returns what the report and the program say of each operator that is no integer one, by its name.

    A layer with a weight in float16 is quantized, and a kernel of floats.
    """
    rows = {row.node: row for row in artefact.report.rows}
    assert rows.keys() == {op.node for op in artefact.program.ops}
    halves = {row.node for row in rows.values() if row.quantized and "float16" in row.how}
    report = {row.node: row.reason for row in rows.values() if not row.quantized}
    program = {op.node: op.reason for op in artefact.program.ops if op.placement != "int8" and op.node not in halves}
    return report, program
