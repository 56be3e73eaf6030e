"""The layout of the run as a picture: stages beside each other, replicas below, hosts as colours."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element

from launch.inspection.page.page_data import PageData
from launch.pages.sections import PageSection, keys, number_table
from launch.pages.svg import Child, at_both_widths, bar, drawing, label
from megalite.checkpoint.manifest import printable
from megalite.parallel.mesh import Mesh
from megalite.units import plural

LEFT, TOP = 82.0, 26.0
MOST_STAGES, MOST_REPLICAS, MOST_CELLS = 32, 16, 128
HOST_COLOURS = (9, 5, 11, 3, 1, 4, 2, 8, 7, 6, 0)
UNKNOWN_HOST = "fill-none"
ROOM_FOR_DIGIT = 7.0
LONGEST_HOST = 24  # characters


def layout_section(found: PageData) -> PageSection:
    """Draws each rank at its place on the three axes, the slowest of each stage marked."""
    mesh = found.mesh
    if mesh is None:
        return PageSection("layout", "Layout", "receipt.json does not say how the model was cut.")
    hosts = _hosts(found)
    slowest = {
        stage.get("slowest_rank") for stage in found.last_breakdown if isinstance(stage.get("slowest_rank"), int)
    }
    has_peers = mesh.world_size > mesh.pipeline_parallel_size
    names = list(dict.fromkeys(hosts.values()))
    colours = {name: f"fill-{HOST_COLOURS[place % len(HOST_COLOURS)]}" for place, name in enumerate(names)}
    figure = at_both_widths(lambda width: _picture(mesh, hosts, colours, slowest if has_peers else set(), width))
    if names:
        figure.append(keys([(colours[name], printable(name)) for name in names[: len(HOST_COLOURS)]]))
    caption = (
        f"{plural(mesh.world_size, 'rank')}: {plural(mesh.pipeline_parallel_size, 'pipeline stage')}, "
        f"{plural(mesh.replicas, 'replica')} (rows), {plural(mesh.tensor_parallel_size, 'tensor rank')} "
        "(beside each other in a row)."
    )
    if has_peers and slowest:
        caption += " Outlined: the rank of each stage with most own work in the last recorded step."
    if len(names) > len(HOST_COLOURS):
        caption += f" Colours repeat: there are {len(names)} hosts."
    stages, replicas, tensors = _shown(mesh)
    if stages * replicas * tensors < mesh.world_size:
        caption += f" The first {stages * replicas * tensors} places are drawn."
    rows = [[name, plural(sum(host == name for host in hosts.values()), "rank")] for name in names]
    table = number_table(["host", "ranks in the timeline"], rows, words=[0]) if rows else None
    return PageSection("layout", "Layout", caption, figure, table)


def _hosts(found: PageData) -> dict[int, str]:
    """Returns the host of each rank that has a timeline; of a run on one rank, that of its receipt."""
    if found.kept is not None:
        return {rank: each.owner.host for rank, each in sorted(found.kept.aligned.timelines.items())}
    host = found.history.files.host
    return {0: host} if host is not None and found.mesh is not None else {}


def _shown(mesh: Mesh) -> tuple[int, int, int]:
    """Returns how many stages, replicas and tensor ranks are drawn."""
    stages = min(mesh.pipeline_parallel_size, MOST_STAGES)
    tensors = min(mesh.tensor_parallel_size, max(1, MOST_CELLS // stages), 16)
    return stages, min(mesh.replicas, MOST_REPLICAS, max(1, MOST_CELLS // (stages * tensors))), tensors


def _picture(
    mesh: Mesh, hosts: Mapping[int, str], colours: Mapping[str, str], slowest: set[object], width: float
) -> Element:
    stages, replicas, tensors = _shown(mesh)
    column = min((width - LEFT) / stages, 56.0 * tensors + 10)
    cell, height = (column - 8) / tensors, 24.0
    drawn: list[Child] = []
    for stage in range(stages):
        name = f"stage {stage}" if column > 60 else str(stage)
        drawn.append(label(LEFT + column * (stage + 0.5) - 4, TOP - 8, name, "tick", "middle"))
    for replica in range(replicas):
        y = TOP + height * replica
        drawn.append(label(LEFT - 10, y + 15, f"replica {replica}", "tick", "end"))
        for stage in range(stages):
            for tensor in range(tensors):
                rank = mesh.rank(stage, replica, tensor)
                x, host = LEFT + column * stage + cell * tensor, hosts.get(rank)
                kind = colours[host] if host is not None else UNKNOWN_HOST
                outline = " slowest" if rank in slowest else ""
                title = f"rank {rank} on {(host or 'an unknown host')[:LONGEST_HOST]}"
                drawn.append(
                    bar(
                        x, y, cell - 2, height - 4, printable(title), id=f"place-{rank}", class_=f"{kind} cell{outline}"
                    )
                )
                if cell - 2 > ROOM_FOR_DIGIT * len(str(rank)) + 2:
                    drawn.append(label(x + cell / 2 - 1, y + 14, str(rank), "in-box", "middle"))
    return drawing("layout-drawing", "Ranks by stage, replica and tensor rank", width, TOP + height * replicas, drawn)
