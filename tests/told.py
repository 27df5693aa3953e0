"""What a report and a program tell of the same operators."""


def told(artefact):
    """Returns what the report and the program say of each operator that is no integer one, by its name.

    A layer with a weight in float16 is quantized, and a kernel of floats; what reads integers outside of delegates has
    no reason.
    """
    rows = {row.node: row for row in artefact.report.rows}
    assert rows.keys() == {op.node for op in artefact.program.ops}
    halves = {row.node for row in rows.values() if row.quantized and "float16" in row.how}
    report = {row.node: row.reason for row in rows.values() if not row.quantized}
    others = [op for op in artefact.program.ops if op.placement != "int8" and op.node not in halves]
    integers = {op.node for op in others if op.placement == "portable" and rows[op.node].quantized and not op.reason}
    program = {op.node: op.reason for op in others if op.node not in integers}
    return report, program
