"""Names of the rows that each benchmark can measure, from which --only chooses."""

from gdn_bench.passes import end_to_end, gpu, layer, model, step
from gdn_bench.passes.gpu import Session
from gdn_bench.problems import catalog, packets
from gdn_bench.problems.workloads import choose_workloads
from gdn_bench.timing import hosttime


def list_rows(session: Session, label: str) -> list[str]:
    """Return the names of all rows of a command, such as prefill or prefill:slow, whatever --only says."""
    job = label.partition(":")[0]
    if job in gpu.WORKLOADS:
        return [workload.name for workload in session.all_workloads(label)]
    if job == "spec":
        groups = packets.groups(packets.SHAPE, lambda name: True)
        return [packet.name for group in groups for packet in group]
    if job == "step":
        return [f"B={B} {dtype}" for B in step.SHAPE.rows for dtype in step.STATES]
    if job == "layer":
        return [f"{layer.SHAPE} {kind}" for kind in layer.JOBS]
    if job == "stages":
        return [
            workload.name for workload in choose_workloads("prefill", session.problems or catalog.PTO_GVA)
        ]
    if job == "e2e":
        return list(end_to_end.case_names().values())
    if job == "model":
        return [model.case_name()]
    return list(hosttime.CASES) if job == "host" else [gpu.NEW_PROCESS]
