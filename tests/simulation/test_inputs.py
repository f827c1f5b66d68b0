"""Traces, shapes and SLOs as users give them."""

import pytest

from verl_mux.errors import UserError
from verl_mux.simulation.workload.shapes import COLUMNS, find_shapes
from verl_mux.simulation.workload.trace import read_trace
from verl_mux.simulation.workload.workload import draw_workload, parse_slo


def test_rows_come_in_order_of_arrival_with_or_without_gpus(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("job,arrival_h,duration_h,note,gpus\nb,2,1,x,16\na,1,1,y,\n")
    rows = read_trace(path)
    assert [(row.job, row.gpus) for row in rows] == [("a", None), ("b", 16)]
    jobs = [arrival.job for arrival in draw_workload(rows, find_shapes("balanced"), (1.5, 1.5), seed=0)]
    assert jobs[1].rollout_nodes == jobs[1].train_nodes == 2 and jobs[0].slo == 1.5


def test_a_missing_column_is_named(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("job,arrival_h\na,1\n")
    with pytest.raises(UserError, match="column 'duration_h' is missing"):
        read_trace(path)


@pytest.mark.parametrize(("spec", "found"), [("uniform:1,2", (1, 2)), ("1.5", (1.5, 1.5))])
def test_an_slo_is_a_number_or_a_range(spec, found):
    assert parse_slo(spec) == found


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("huge,1,2,3,4", "line 2: size is 'huge'; allowed: small, medium, large"),
        ("small,2,1,3,4", "no minimum above its maximum"),
        ("small,1,2,3", "line 2: a shape needs"),
    ],
)
def test_a_shape_of_ones_own(tmp_path, row, words):
    path = tmp_path / "shapes.csv"
    path.write_text(",".join(COLUMNS) + "\nsmall,1,2,3,4\n")
    (shape,) = find_shapes(str(path))
    assert (shape.size, shape.rollout, shape.train) == ("small", (1, 2), (3, 4))
    path.write_text(",".join(COLUMNS) + f"\n{row}\n")
    with pytest.raises(UserError, match=words):
        find_shapes(str(path))
