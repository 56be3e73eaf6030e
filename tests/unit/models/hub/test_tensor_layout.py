"""The table of runs reads blocks of our tensors from theirs, and of theirs from ours, without touching other rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.hub.tensor_layout import HubLayout, HubTensor, RowRun, Shape, Slices, hub_layout


@dataclass(frozen=True)
class Store:
    """Tensors by name, and which numbers of them were read."""

    tensors: dict[str, Tensor]
    touched: list[int]

    def read(self, name: str, source: Slices) -> Tensor:
        assert len(source) == self.tensors[name].ndim
        block = self.tensors[name][source]
        self.touched.append(block.numel())
        return block


@dataclass(frozen=True)
class Case:
    layout: HubLayout
    ours: dict[str, Tensor]
    theirs: dict[str, Tensor]  # built by indexing rows one by one


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tensors of ours cut into runs that are shuffled into tensors of theirs, vectors and matrices of two widths."""
    ours: dict[str, Tensor] = {}
    by_width: dict[Shape, list[tuple[str, int, int]]] = {}  # numbers of a row -> (name, first row, rows)
    for index in range(draw(st.integers(1, 5))):
        rows, rest = draw(st.integers(1, 7)), draw(st.sampled_from([(), (3,), (5,)]))
        ours[f"own.{index}"] = torch.randn(rows, *rest)
        cuts = sorted(draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []
        for first, last in zip([0, *cuts], [*cuts, rows], strict=True):
            by_width.setdefault(rest, []).append((f"own.{index}", first, last - first))
    tensors, theirs = [], {}
    for rest, runs in by_width.items():
        shuffled = draw(st.permutations(runs))
        while shuffled:
            count = draw(st.integers(1, len(shuffled)))
            members, shuffled = shuffled[:count], shuffled[count:]
            placed, hub = [], 0
            for name, first, rows in members:
                placed.append(RowRun(name, first, hub, rows))
                hub += rows
            is_transposed = bool(rest) and draw(st.booleans())
            numbers = torch.stack([ours[run.name][run.own + row] for run in placed for row in range(run.count)])
            name = f"hub.{len(tensors)}"
            theirs[name] = numbers.t().contiguous() if is_transposed else numbers
            tensors.append(HubTensor(name, tuple(theirs[name].shape), tuple(placed), is_transposed))
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    return Case(HubLayout(tensors, shapes), ours, theirs)


def block_of(draw: st.DrawFn, shape: Shape) -> Slices:
    bounds = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return tuple(slice(*pair) for pair in bounds)


@given(case=cases(), data=st.data())
@settings(deadline=None)
def test_any_block_of_ours_is_read_from_theirs_and_the_other_way_around(case: Case, data: st.DataObject) -> None:
    """Catches a run off by a row, a block's offset, a wrong transpose; exact, because numbers are only moved."""
    for mine, other, read in (
        (case.ours, case.theirs, case.layout.read_own),
        (case.theirs, case.ours, case.layout.read_hub),
    ):
        for name, tensor in mine.items():
            source = block_of(data.draw, tuple(tensor.shape))
            store = Store(other, [])
            assert torch.equal(read(store.read, name, source), tensor[source])
            assert sum(store.touched) == tensor[source].numel()  # not a number more than the block


@given(case=cases())
@settings(deadline=None)
def test_hub_names_are_the_tensors_that_a_read_touches(case: Case) -> None:
    for name, tensor in case.ours.items():
        touched = []

        def read(hub_name: str, source: Slices, touched: list[str] = touched) -> Tensor:
            touched.append(hub_name)
            return case.theirs[hub_name][source]

        case.layout.read_own(read, name, tuple(slice(0, n) for n in tensor.shape))
        assert list(dict.fromkeys(touched)) == list(case.layout.hub_names(name))


def test_a_block_inside_one_run_is_not_copied() -> None:
    """A renamed weight of a mapped file must stay a view of that file."""
    names = {"a": (4, 3), "b": (2, 3)}
    runs = (RowRun("a", 0, 0, 4), RowRun("b", 0, 4, 2))
    layout = HubLayout([HubTensor("ab", (6, 3), runs)], names)
    disk = torch.randn(6, 3)
    block = layout.read_own(lambda _, source: disk[source], "b", (slice(0, 2), slice(1, 3)))
    assert block.data_ptr() == disk[4:, 1:].data_ptr()
    ours = {"a": torch.randn(4, 3), "b": torch.randn(2, 3)}
    block = layout.read_hub(lambda name, source: ours[name][source], "ab", (slice(1, 3), slice(0, 3)))
    assert block.data_ptr() == ours["a"][1:].data_ptr()


BROKEN: list[tuple[str, list[HubTensor]]] = [
    ("ends at 2", [HubTensor("h", (3, 2), (RowRun("a", 0, 0, 2), RowRun("a", 3, 3, 1)))]),
    ("cover 3 of 4", [HubTensor("h", (3, 2), (RowRun("a", 0, 0, 3),))]),
    ("ends at 3", [HubTensor("h", (3, 2), (RowRun("a", 0, 0, 3),)), HubTensor("g", (2, 2), (RowRun("a", 2, 0, 2),))]),
    ("one name", [HubTensor("h", (2, 2), (RowRun("a", 0, 0, 2),)), HubTensor("h", (2, 2), (RowRun("a", 2, 0, 2),))]),
    ("cover 4 of 5", [HubTensor("h", (5, 2), (RowRun("a", 0, 0, 4),))]),
    ("holds a", [HubTensor("h", (4, 3), (RowRun("a", 0, 0, 4),))]),
]


@pytest.mark.parametrize(("sentence", "tensors"), BROKEN, ids=[sentence for sentence, _ in BROKEN])
def test_a_table_that_loses_or_doubles_a_row_is_no_layout(sentence: str, tensors: list[HubTensor]) -> None:
    with pytest.raises(AssertionError, match=sentence):
        HubLayout(tensors, {"a": (4, 2)})


def test_names_are_replaced_by_whole_words_and_never_twice() -> None:
    """`mlp.gate` must not change `mlp.gate_proj`, and a swap must not swap back."""
    swapped = {"mlp.gate_proj": "mlp.up_proj", "mlp.up_proj": "mlp.gate_proj", "mlp.gate": "mlp.router"}
    shapes: dict[str, Shape] = {
        f"model.layers.0.mlp.{name}.weight": (2, 2) for name in ("gate_proj", "up_proj", "gate")
    }
    found = hub_layout(shapes, swapped, {}, (), None)
    assert [found.hub_names(name)[0].split(".", 3)[3] for name in shapes] == [
        "mlp.up_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.router.weight",
    ]


def test_fused_tensors_hold_part_after_part_or_head_after_head() -> None:
    shapes: dict[str, Shape] = {f"l.0.{part}_proj.weight": (4, 3) for part in "qkv"}
    fused = {"qkv": ("q_proj", "k_proj", "v_proj")}
    whole = hub_layout(shapes, {}, fused, (), None).tensors["l.0.qkv.weight"]
    assert [(run.name[4], run.own, run.hub, run.count) for run in whole.runs] == [
        ("q", 0, 0, 4),
        ("k", 0, 4, 4),
        ("v", 0, 8, 4),
    ]
    by_head = hub_layout(shapes, {}, fused, (), 2).tensors["l.0.qkv.weight"]
    assert [(run.name[4], run.own, run.count) for run in by_head.runs] == [
        (part, own, 2) for own in (0, 2) for part in "qkv"
    ]
