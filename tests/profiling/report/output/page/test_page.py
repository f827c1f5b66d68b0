"""The page, in a headless Chromium: it opens without a network, answers keys, and stays quick with 100,000 requests."""

import json
import re

import numpy as np
import pytest

from tests.profiling.browser import CHROMIUM, Browser
from tests.profiling.made_engines import make as make_engines
from tests.profiling.made_logs import Lines, Made, make_run, read_run
from tests.profiling.made_mux import make_mux_run
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.page.page import make_page
from verl_mux.profiling.report.output.summary import summarise

NAMES = ("mux", "plain", "hostile", "empty", "engines", "texts")
READY = 'document.documentElement.dataset.ready === "yes"'
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def page_of(directory, out):
    analysis = Analysis(read_run(directory))
    out.write_text(make_page(analysis, summarise(analysis)), encoding="utf-8")
    return out


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    home = tmp_path_factory.mktemp("pages")
    make_mux_run(home / "mux", alone=2, together=4)
    made = Made(requests=128, workers=4, steps=2, first_step=66, stalls={(67, 0): (12.0, 150.0)}, slow_rewards={(66, 3, 5): 60.0})
    make_run(home / "plain", made)
    lines = Lines(0, 1)
    lines.add(1.0, "async_rollout_request_complete", 1.0, {"request_id": "</script><img src=x onerror=boom()>"})
    lines.write(home / "hostile")
    (home / "empty").mkdir()
    make_engines(home / "engines", seed=1, steps=2, requests=24, turns=2, slower={1: 3.0})
    make_engines(home / "texts", seed=1, steps=1, requests=8)
    add_text(home / "texts", prompt="1 + 1 = <b>", response="2", left_out=7)
    return {name: page_of(home / name, home / f"{name}.html") for name in NAMES}


def add_text(run, **text):
    """A line with the text of the run's first request to end, as mux.profile.texts has it written."""
    path = next(run.rglob("events/rollout/step_1/worker_0.jsonl"))
    ends = [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == "async_rollout_request_complete"]
    line = ends[0] | {"event": "request_text", "extra": {"request_id": ends[0]["extra"]["request_id"], **text}}
    del line["duration_sec"]
    path.write_text(path.read_text() + json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        opened.call("Network.enable")
        opened.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        yield opened


@pytest.fixture
def shown(browser, pages):
    def show(name):
        browser.logged.clear()
        browser.open(pages[name].as_uri(), READY)
        browser.frame()
        return browser

    return show


def test_the_page_names_nothing_outside_itself(pages):
    for page in pages.values():
        markup = page.read_text().split('<script type="application/json"')[0]
        assert not re.search(r"""(src|href)\s*=|url\(|@import""", markup)


def test_requests_travel_whole(pages):
    requests = data_of(pages["plain"])["requests"]
    assert (requests["count"], requests["of"]) == (1024, 1024)
    assert (len(requests["lanes"]["worker"]), requests["lanes"]["replica"]) == (4, [])


def test_waits_and_leases_travel_whole(pages):
    data = data_of(pages["mux"])
    assert len(data["holds"]) == 2 * 2 * (2 + 4)
    assert len(data["alone"]) == 2 * 2 * 4
    assert [segment["mode"] for segment in data["segments"]] == ["sequential", "interleaved"]


@needs_chromium
@pytest.mark.parametrize("name", ["mux", "plain", "hostile", "empty"])
def test_every_page_opens_without_a_network_and_without_an_error(shown, name):
    browser = shown(name)
    assert browser.logged == []
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("performance.getEntriesByType('resource').length") == 0


@needs_chromium
def test_a_person_reads_at_once_which_job_waited_for_what(shown):
    text = shown("mux").evaluate("document.getElementById('waits').innerText")
    assert re.search(r"fibonacci.*waited .* to rollout behind products", text, re.S)
    assert re.search(r"products.*waited .* to rollout behind fibonacci", text, re.S)


@needs_chromium
def test_findings_are_shown_and_lead_to_their_place(shown):
    browser = shown("plain")
    text = browser.evaluate("document.getElementById('findings').innerText")
    assert "silent gap" in text
    assert "step 67, worker 0" in text
    browser.press("f")
    view = browser.evaluate("[view.from, view.to, highlight.start, highlight.end, highlight.rows]")
    assert view[0] < view[2] < view[3] < view[1]
    assert view[3] - view[2] == pytest.approx(150.0, abs=0.2)
    assert view[4] == [0]
    assert browser.evaluate("document.getElementById('cdf-step').selectedOptions[0].text") == "67"


@needs_chromium
def test_the_keyboard_steps_through_every_event(shown):
    browser = shown("mux")
    places = browser.evaluate("(setCursor(0), replayEvents.map(() => (stepEvent(1), view.at)))")
    assert places == sorted(places)
    assert places[-1] == pytest.approx(browser.evaluate("replayEvents[replayEvents.length - 1].t"))
    browser.evaluate("setCursor(DATA.window[0] + 1)")
    before = browser.evaluate("view.at")
    browser.press("ArrowRight")
    assert browser.evaluate("view.at") > before
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    assert browser.evaluate("view.at") <= before


@needs_chromium
def test_the_replay_says_what_each_job_does_or_waits_for(shown):
    browser = shown("mux")
    wait = browser.evaluate("DATA.waits.find((w) => w.job === 'products' && w.end - w.start > 1 && w.start > DATA.window[0] + 5)")
    browser.evaluate(f"setCursor({(wait['start'] + wait['end']) / 2})")
    browser.frame()
    now = browser.evaluate("document.getElementById('now').innerText")
    assert re.search(r"products: waits for r0 to rollout, held by fibonacci", now)
    assert re.search(r"fibonacci: rollout on r0", now)
    assert "without waiting it would be" in now


@needs_chromium
def test_playing_moves_the_cursor_and_stops_on_request(shown):
    browser = shown("mux")
    before = browser.evaluate("view.at")
    browser.press(" ")
    browser.wait(f"view.at > {before}")
    browser.press(" ")
    assert browser.evaluate("view.playing") is False
    assert browser.evaluate("document.getElementById('play').textContent") == "play"


@needs_chromium
def test_light_and_dark_differ_and_the_system_decides_first(shown):
    browser = shown("mux")
    assert browser.evaluate("document.documentElement.dataset.theme") == "light"
    light = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.press("d")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != light
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    try:
        assert shown("mux").evaluate("document.documentElement.dataset.theme") == "dark"
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])


@needs_chromium
def test_zooming_keeps_the_run_in_sight(shown):
    browser = shown("plain")
    for key in "++++++++++aaaee":
        browser.press(key)
    assert browser.evaluate("view.to > view.from && view.from > -DATA.length && view.to < 2 * DATA.length")
    browser.press("Home")
    assert browser.evaluate("view.to - view.from") == pytest.approx(browser.evaluate("DATA.length"))


def click_lanes(browser, right: int, down: str):
    x, y = browser.evaluate(f"(({{left, top}}) => [left + {right}, top + {down}])($('lanes').getBoundingClientRect())")
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    browser.frame()


@needs_chromium
def test_a_click_on_a_worker_shows_its_requests(shown):
    browser = shown("plain")
    browser.evaluate("$('lanes').scrollIntoView()")
    click_lanes(browser, 300, "laneTops[1] + 5")
    assert browser.evaluate("openLane") == 1
    assert browser.evaluate("lanes()[1].shown.length") > 100
    assert "engine" in browser.evaluate("requestText(lanes()[1].shown[0])")


@needs_chromium
def test_a_click_on_a_request_shows_its_whole_life(shown):
    browser = shown("engines")
    browser.evaluate("openLane = 0, redraw(), $('lanes').scrollIntoView()")
    browser.frame()
    click_lanes(browser, 400, "laneTops[0] + lanes()[0].each / 2")
    told = browser.evaluate("$('life').innerText")
    assert "turn 1, stay 1: replica" in told and "tools of turn 1" in told and "reward, score 0.5" in told
    assert browser.evaluate("openLane") == 0


@needs_chromium
def test_a_link_leads_to_its_finding(browser, pages):
    browser.logged.clear()
    browser.open(pages["engines"].as_uri() + "#finding-1", READY)
    browser.wait("highlight !== null && highlight.rows.length === 1")
    assert browser.logged == []


@needs_chromium
def test_lives_hold_stays_tools_and_reward_in_order(shown):
    browser = shown("engines")
    life = browser.evaluate("lifeOf(0)")
    assert [what for what, *_ in life] == ["queue", "engine", "tool", "queue", "engine", "reward"]
    assert all(start <= end for _, start, end, _ in life) and life == sorted(life, key=lambda it: it[1])
    assert re.match(r"turn 2, stay 2: replica \d on r\d, \d+ tokens", life[4][3])
    assert browser.evaluate("Array.from({ length: DATA.requests.count }, (_, i) => lifeOf(i).length).every((n) => n >= 6)")


@needs_chromium
def test_a_finding_of_a_replica_marks_its_row_alone(shown):
    browser = shown("engines")
    assert browser.evaluate("S.findings[0].replica") == 1
    browser.evaluate("setKind('worker')")
    browser.press("f")
    assert browser.evaluate("[kind, highlight.rows.map((index) => lanes()[index].title)]") == ["replica", ["replica 1 on r0"]]
    curves = browser.evaluate("[...cdfGroups('a', S.findings[0].step).keys()].map((lane) => lanes()[lane].unit).sort()")
    assert curves == [0, 1, 2, 3]


@needs_chromium
def test_rows_are_workers_replicas_or_nodes(shown):
    browser = shown("engines")
    seen = {}
    for _ in range(3):
        seen[browser.evaluate("kind")] = browser.evaluate("lanes().map((lane) => [lane.title, lane.past - lane.first])")
        browser.press("r")
    every = browser.evaluate("DATA.requests.count")
    assert {name: sum(n for _, n in rows) for name, rows in seen.items()} == {"worker": every, "replica": every, "node": every}
    assert [title for title, _ in seen["node"]] == ["node r0", "node r1"]
    assert browser.logged == []


@needs_chromium
def test_replicas_and_nodes_stand_in_tables_the_slowest_first(shown):
    browser = shown("engines")
    replicas = browser.evaluate("$('replicas').innerText")
    assert len(replicas.splitlines()) == 1 + 4 and "ms a token" in replicas
    assert replicas.splitlines()[1].split()[0] == "1"  # the slowest
    assert len(browser.evaluate("$('nodes').innerText").splitlines()) == 1 + 2
    assert shown("plain").evaluate("$('engines-section').hidden")


@needs_chromium
def test_a_life_shows_the_text_that_was_logged(shown):
    browser = shown("texts")
    index = int(browser.evaluate("Object.keys(DATA.requests.texts)[0]"))
    browser.evaluate(f"showLife({index})")
    assert browser.evaluate("[...document.querySelectorAll('#life pre')].map((pre) => pre.innerText)") == ["1 + 1 = <b>", "2"]
    assert "7 characters were left out" in browser.evaluate("$('life').innerText")
    browser.evaluate(f"showLife({index + 1})")
    assert browser.evaluate("document.querySelectorAll('#life pre').length") == 0


@needs_chromium
def test_nothing_is_drawn_blank(shown):
    browser = shown("mux")
    for canvas in ("replay", "overview", "lanes", "cdf", "shares"):
        colours = browser.evaluate(
            f"(() => {{ const c = $('{canvas}'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "const seen = new Set(); for (let i = 0; i < d.length; i += 16) seen.add(d[i] + ',' + d[i + 1] + ',' + d[i + 2]);"
            "return seen.size; })()"
        )
        assert colours > 3, canvas


@pytest.fixture(scope="module")
def hundred_thousand(tmp_path_factory):
    """200 steps of 8 workers with 64 requests each, written without the generator's care, for speed."""
    directory = tmp_path_factory.mktemp("many")
    ends = 10 + 10 * np.random.default_rng(0).random((200, 8, 64))
    for step in range(200):
        for worker in range(8):
            lines = Lines(worker, step)
            for number, end in enumerate(ends[step, worker]):
                done = {"request_id": f"{step}-{worker}-{number}"}
                lines.add(30.0 * step + end, "async_rollout_request_complete", float(end), done)
            lines.write(directory)
    return page_of(directory, directory / "page.html")


@needs_chromium
def test_a_hundred_thousand_requests_are_all_there_and_can_be_moved(browser, hundred_thousand):
    browser.logged.clear()
    browser.open(hundred_thousand.as_uri(), READY)
    assert browser.evaluate("DATA.requests.count") == 200 * 8 * 64
    for _ in range(5):
        browser.press("+")
    browser.evaluate("openLane = 3, setView(0, DATA.length)")
    browser.frame()
    browser.press("c")
    assert browser.logged == []
