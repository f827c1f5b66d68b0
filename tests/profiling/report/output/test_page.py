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
from verl_mux.profiling.report.output.page import make_page
from verl_mux.profiling.report.output.summary import summarise

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
    return {name: page_of(home / name, home / f"{name}.html") for name in ("mux", "plain", "hostile", "empty", "engines")}


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
    assert len(requests["lanes"]["worker"]) == 4 and list(requests["lanes"]) == ["worker"]


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
    view = browser.evaluate("[view.from, view.to, highlight.start, highlight.end, highlight.worker]")
    assert view[0] < view[2] < view[3] < view[1]
    assert view[3] - view[2] == pytest.approx(150.0, abs=0.2)
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


@needs_chromium
def test_a_click_on_a_worker_shows_its_requests(shown):
    browser = shown("plain")
    browser.evaluate("$('lanes').scrollIntoView()")
    box = "$('lanes').getBoundingClientRect()"
    x, y = browser.evaluate(f"[{box}.left + 300, {box}.top + laneTops[1] + 5]")
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    browser.frame()
    assert browser.evaluate("openLane") == 1
    assert browser.evaluate("LANES[1].shown.length") > 100
    assert "engine" in browser.evaluate("requestText(LANES[1].shown[0])")


@needs_chromium
def test_a_click_on_a_request_shows_its_whole_life(shown):
    browser = shown("engines")
    browser.evaluate("openLane = 0, redraw(), $('lanes').scrollIntoView()")
    browser.frame()
    box = "$('lanes').getBoundingClientRect()"
    x, y = browser.evaluate(f"[{box}.left + 400, {box}.top + laneTops[0] + LANES[0].each / 2]")
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    browser.frame()
    told = browser.evaluate("$('life').innerText")
    assert "turn 1, stay 1: replica" in told and "tools of turn 1" in told and "reward, score 0.5" in told
    assert browser.evaluate("openLane") == 0


@needs_chromium
def test_rows_are_replicas_workers_or_nodes(shown):
    browser = shown("engines")
    assert browser.evaluate("[laneView, LANES.map((l) => l.name)]") == ["replica", [0, 1, 2, 3]]
    rows = {by: browser.evaluate(f"(showLanesBy('{by}'), redraw(), [LANES.length, ORDER.length])") for by in ("worker", "node")}
    assert rows == {"worker": [8, 48], "node": [2, 48]}
    assert browser.evaluate("$('lanes-by').value") == "node"
    assert "thin lines are nodes" in browser.evaluate("$('cdf-text').textContent")
    assert browser.logged == []


@needs_chromium
def test_a_finding_about_a_replica_leads_to_its_row(shown):
    browser = shown("engines")
    browser.evaluate("showLanesBy('worker')")
    of = browser.evaluate("S.findings.findIndex((f) => f.kind === 'straggler')")
    browser.evaluate(f"showFinding(S.findings[{of}])")
    assert browser.evaluate("[laneView, highlight.replica]") == ["replica", 1]


@needs_chromium
def test_replicas_and_nodes_stand_in_tables_the_slowest_first(shown):
    text = shown("engines").evaluate("$('engines').innerText")
    assert re.search(r"a 1 on r0.*a 0 on r0", text, re.S) and re.search(r"node.*a r0.*a r1", text, re.S)


@needs_chromium
def test_what_a_request_said_is_shown_where_it_was_logged(browser, tmp_path):
    make_engines(tmp_path, seed=1, steps=2, requests=6, replicas=1)
    name = "00020003_0"
    line = {"timestamp": "2025-08-11T23:00:30", "event": "request_text", "workid": 0, "step": 2, "role": "rollout", "job": "a"}
    line |= {"run": "0a1b2c3d", "extra": {"request_id": name, "prompt": "2+<b>2</b>=?", "response": "four", "left_out": 0}}
    with next(tmp_path.glob("a/events/rollout/step_2/worker_0.jsonl")).open("a") as file:
        file.write(json.dumps(line) + "\n")
    browser.open(page_of(tmp_path, tmp_path / "page.html").as_uri(), READY)
    browser.evaluate(f"showLife(requestNamed({{request_id: '{name}', job: 'a', step: 2}}))")
    assert browser.evaluate("[...$('life').querySelectorAll('pre')].map((it) => it.textContent)") == ["2+<b>2</b>=?", "four"]
    browser.evaluate("showLife(requestNamed({request_id: '00020002_0', job: 'a', step: 2}))")
    assert browser.evaluate("$('life').querySelectorAll('pre').length") == 0


@needs_chromium
def test_a_link_leads_to_its_finding(browser, pages):
    browser.logged.clear()
    browser.open(pages["engines"].as_uri() + "#finding-1", READY)
    browser.wait("highlight !== null && highlight.job === S.findings[0].job")
    assert browser.logged == []


def test_lives_hold_stays_tools_and_reward_in_order(pages):
    requests = data_of(pages["engines"])["requests"]
    life = requests["lives"]["0"]
    assert [what for what, *_ in life] == ["queue", "engine", "tool", "queue", "engine", "reward"]
    assert all(start <= end for _, start, end, _ in life) and life == sorted(life, key=lambda it: it[1])
    assert "turn 2, stay 2: replica" in life[4][3]


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
