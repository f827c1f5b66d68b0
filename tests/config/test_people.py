"""What a job's config says of the people behind it."""

from datetime import datetime, timedelta, timezone

import pytest

from verl_mux.config.people import told
from verl_mux.config.schema import MuxConfig
from verl_mux.errors import UserError

NOW = datetime(2026, 11, 30, 8, 0, tzinfo=timezone(timedelta(hours=1)))


def said(**keys):
    return told(MuxConfig(**keys), NOW)


def test_nothing_is_said_where_nothing_stands():
    assert said() == {"owner": "", "priority": 0, "budget_usd": None}


def test_all_that_stands_there_is_said():
    assert said(owner="ann", priority=3, budget=9.5) == {"owner": "ann", "priority": 3, "budget_usd": 9.5}


def test_a_deadline_is_hours_or_a_time():
    assert said(deadline=1.5)["within_s"] == 5400
    assert said(deadline="2026-11-30T09:30")["deadline_s"] == 5400, "in the zone of now"
    assert said(deadline="2026-11-30T09:30+00:00")["deadline_s"] == 9000


@pytest.mark.parametrize(
    ("deadline", "why"),
    [
        (0.0, "mux.deadline is 0; hours above 0"),
        (float("inf"), "mux.deadline is inf; hours above 0"),
        ("soon", "mux.deadline is 'soon'; hours above 0, or a time such as"),
        ("2026-11-30T07:59", "which is past: it is 2026-11-30T08:00+01:00"),
    ],
)
def test_a_deadline_that_is_none_is_refused(deadline, why):
    with pytest.raises(UserError) as error:
        said(deadline=deadline)
    assert why in str(error.value)
