"""Traces, shapes and SLOs as users give them."""

import pytest

from research.command import parse_rules
from research.workload.workload import SHAPE_COLUMNS, draw_workload, find_shapes, parse_slo, read_trace
from verl_mux.errors import UserError


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
    path.write_text(",".join(SHAPE_COLUMNS) + "\nsmall,1,2,3,4\n")
    (shape,) = find_shapes(str(path))
    assert (shape.size, shape.rollout, shape.train) == ("small", (1, 2), (3, 4))
    path.write_text(",".join(SHAPE_COLUMNS) + f"\n{row}\n")
    with pytest.raises(UserError, match=words):
        find_shapes(str(path))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("a,1e300,1,8", "arrival_h is '1e300'; a number of at least 0 and at most 100000"),
        ("a,0,1e300,8", "duration_h is '1e300'; a number above 0 and at most 100000"),
        ("a,0,nan,8", "duration_h is 'nan'"),
        ("a,0,1,\N{SUPERSCRIPT TWO}", "line 2: gpus is '\N{SUPERSCRIPT TWO}'; a whole number from 1"),
        ("a,0,1," + "9" * 6000, "a whole number from 1 to 8192 is needed"),
    ],
)
def test_a_number_that_no_job_has_is_refused(tmp_path, row, words):
    path = tmp_path / "trace.csv"
    path.write_text(f"job,arrival_h,duration_h,gpus\n{row}\n")
    with pytest.raises(UserError, match=words):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\x96\xff\n", "is not a CSV file"), (b"small,1,inf,3,4", "above 0 and finite"), (b"small,nan,2,3,4", "above 0")],
)
def test_shapes_that_are_none_are_refused(tmp_path, content, words):
    path = tmp_path / "shapes.csv"
    path.write_bytes((b"" if content[0] > 127 else ",".join(SHAPE_COLUMNS).encode() + b"\n") + content)
    with pytest.raises(UserError, match=words):
        find_shapes(str(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [("repak=off", "rule 'repak=off' is not known"), ("repack=no", "give on or off"), ("reach=x", "whole number")],
)
def test_a_rule_that_is_not_known_is_refused(change, words):
    with pytest.raises(UserError, match=words):
        parse_rules(5, [change])


def test_rules_are_changed_by_name():
    rules = parse_rules(3, ["repack=off", "reach=6", "keep=0.5"])
    assert (rules.cap, rules.repack, rules.reach, rules.keep) == (3, False, 6, 0.5)
