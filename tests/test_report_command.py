"""`verl-mux report` as a user calls it."""

import json

import pytest
import typer
from typer.testing import CliRunner

from tests.profiling.made_logs import Made, make_run, make_shares
from tests.profiling.made_mux import make_mux_run
from verl_mux.errors import UserError
from verl_mux.report_command import report

app = typer.Typer()
app.command()(report)
KEYS = {"steps", "workers", "requests", "event_share", "completion", "turns", "bubble", "findings", "skipped_lines"}


def call(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def as_json(*arguments):
    return json.loads(call(*arguments, "--json").stdout)


def test_json_has_the_promised_keys_and_the_seeds_numbers(tmp_path):
    summary = as_json(make_shares(tmp_path))
    assert set(summary) >= KEYS
    shares = summary["event_share"]
    named = ("async_generate_duration", "preprocessing_duration", "barrier_wait_duration")
    assert [shares[event] for event in named] == [74.05, 18.57, 6.39]
    assert (summary["steps"], summary["workers"], summary["skipped_lines"]) == (5, 4, 0)


def test_findings_have_the_promised_keys_and_are_shown(tmp_path):
    run = make_run(tmp_path, Made(slow_rewards={(2, 1, 5): 160.0}))
    summary, shown = as_json(run), call(run).stdout
    (finding,) = summary["findings"]
    assert set(finding) >= {"kind", "step", "replica", "node", "worker", "request_id", "seconds", "cost_s", "text"}
    assert (finding["kind"], finding["step"], finding["worker"], finding["request_id"]) == ("reward_wait", 2, 1, "2-1-5")
    assert summary["requests"] == 3 * 4 * 64
    assert summary["turns"]["counts"].keys() == {"1", "2"}
    assert 0.5 < summary["completion"]["t80_over_total"] < 1
    assert "reward wait" in shown and "2-1-5" in shown


def test_tables_tell_findings_shares_jobs_and_bubbles(tmp_path):
    make_mux_run(tmp_path, alone=1, together=2)
    text = call(tmp_path).stdout
    for word in ("fibonacci", "products", "Bubble", "interleaved", "update_actor", "wait"):
        assert word in text


def test_only_some_steps(tmp_path):
    make_run(tmp_path, Made(steps=4, workers=1, requests=8))
    assert as_json(tmp_path, "--steps", "2-3")["steps"] == 2
    assert as_json(tmp_path, "--steps", "4")["steps"] == 1


@pytest.mark.parametrize("steps", ["a", "3-", "4-2", "1-2-3"])
def test_a_range_that_is_none_is_refused(tmp_path, steps):
    with pytest.raises(UserError, match="--steps"):
        call(make_shares(tmp_path), "--steps", steps)


def test_two_runs_against_each_other(tmp_path):
    make_run(tmp_path / "a", Made(steps=1, workers=2, requests=16))
    make_run(tmp_path / "b", Made(steps=1, workers=2, requests=16, seconds_per_token=0.08))
    figures = {row["figure"]: row for row in as_json(tmp_path / "a", "--against", tmp_path / "b")["against"]["figures"]}
    assert figures["seconds to total"]["change"] == pytest.approx(-0.5, abs=0.1)
    assert "against" in call(tmp_path / "a", "--against", tmp_path / "b").stdout


def test_a_name_with_markup_is_shown_as_it_is(tmp_path):
    make_shares(tmp_path / "x", shares={"[bold]odd[/nope]": 60.0, "async_generate_duration": 40.0})
    assert "[bold]odd[/nope]" in call(tmp_path / "x").stdout


@pytest.mark.parametrize("steps", [(), ("--steps", "99")])
def test_a_folder_or_steps_without_an_event_log_are_refused(tmp_path, steps):
    if steps:
        make_run(tmp_path, Made(steps=1, workers=1, requests=1))
    with pytest.raises(UserError, match="holds no event log .*nothing to report"):
        call(tmp_path, *steps, "--json")


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        call(tmp_path / "nothing")


def test_an_empty_run_can_be_written_in_every_form(tmp_path):
    (tmp_path / "run" / "step_1").mkdir(parents=True)
    (tmp_path / "run" / "step_1" / "worker_0.jsonl").touch()
    out = tmp_path / "out"
    call(tmp_path / "run", "--html", out / "page.html", "--trace", out / "trace.json")
    assert (out / "page.html").stat().st_size > 1000
    assert json.loads((out / "trace.json").read_text())["traceEvents"] == []
