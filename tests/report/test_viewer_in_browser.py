"""The viewer as a browser shows it. Needs playwright and a Chromium on the PATH; both are missing from most machines.

pip install playwright axe-playwright-python && apt-get install chromium
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fppo.report import view_page, view_server
from fppo.report.view_server import Viewed
from fppo.runs.sample_files import SAMPLES
from tests.report import view_runs

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

NODES = "document.querySelectorAll('.rows .row').length"


class Window:
    """A window of the browser, which fails on errors of a page."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.errors: list[str] = []

    def open(self, address: str, **options: Any) -> Any:
        page = self._browser.new_context(viewport={"width": 1360, "height": 860}, **options).new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.goto(address)
        page.wait_for_selector("body[data-opened]", timeout=60_000)
        return page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        window = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield window
        window.close()


@pytest.fixture
def window(browser) -> Iterator[Window]:
    window = Window(browser)
    yield window
    assert window.errors == []


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return view_runs.write_run(tmp_path_factory.mktemp("runs") / "mine", steps=6)


@pytest.fixture(scope="module")
def saved(run) -> str:
    return view_page.export([run], run.parent / "page.html", most_bytes=1e9).as_uri()


@contextlib.contextmanager
def served(runs: list[Path]) -> Iterator[str]:
    """The address of a server of runs."""
    shown = Viewed(runs=runs, titles=[run.name for run in runs], key="key")
    running = view_server.server(shown, 0)
    thread = threading.Thread(target=running.serve_forever, args=(0.05,))
    thread.start()
    yield view_server.address_of(shown, running)
    running.shutdown()
    thread.join()
    running.server_close()


def until(page: Any, condition: str) -> None:
    """Wait for a condition. (playwright's own way evaluates text in the page, which the page's policy forbids.)"""
    for _ in range(400):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"this never came true: {condition}")


def opened_row(page: Any, step: int, number: int) -> None:
    page.evaluate(f"location.hash = 'rows/0/{step}/{number}'")
    page.wait_for_selector(".detail")
    until(page, f"location.hash.endsWith('/{step}/{number}')")


def test_the_overview_names_what_a_run_is(saved, window):
    page = window.open(saved)
    assert page.title() == "mine · fppo"
    text = page.inner_text(".overview")
    for words in (
        "Reward in training",
        "6 of 30",
        "Where a step's time goes",
        "reward.weights",
        "fppo train",
        "fppo replay",
    ):
        assert words in text, words
    assert page.locator("figure.chart canvas").count() >= 3
    assert "Memory of step 6, on rank 1, which has most of 2" in text
    assert page.locator(".memory .stack").count() == 2
    assert page.locator(".memory .stack").last.get_attribute("aria-label") == (
        "update_actor: parameters 4 GiB, moments 8 GiB, gradients 2 GiB, activations 5 GiB"
    )
    page.click("text=The numbers of this memory")
    assert page.locator(".wide[aria-label^=Memory] tr").all_inner_texts() == [
        "stage\tparameters\tmoments\tgradients\tcache\tactivations\tpeak",
        "gen\t4 GiB\t8 GiB\t0 B\t3 GiB\t256 MiB\t15.3 GiB",
        "update_actor\t4 GiB\t8 GiB\t2 GiB\t0 B\t5 GiB\t19 GiB",
    ]
    assert page.locator(".timeline rect").count() == 9
    page.locator(".timeline rect").first.focus()
    assert "gen, step 4" in page.inner_text(".readout-line")


def test_a_stranger_finds_the_worst_response_and_why(saved, window):
    """Two clicks: the worst response, and what gave it its score."""
    page = window.open(saved)
    page.click("text=the worst response")
    page.wait_for_selector(".detail")
    assert page.inner_text(".facts .big") == "0"
    text = page.inner_text(".detail")
    assert "Why its score is 0" in text
    assert re.search(r"exact_match\s+0\s+. 1", text)
    assert re.search(r"politeness\s+0\s+. 0.5", text)
    assert "1 response scored higher" in text
    assert "Its mean advantage is" in text


def test_rows_are_filtered_sorted_and_searched(saved, window):
    page = window.open(f"{saved}#rows")
    assert page.inner_text("#count") == "48 rows, 6 steps"
    page.fill("#filter", "score>=0.75 step<3")
    assert page.inner_text("#count") == "4 of 48 rows"
    page.click(".table-head >> text=Score")
    scores = [float(x) for x in page.locator(".row .cell.score").all_inner_texts()]
    assert scores == sorted(scores) == [0.75, 0.75, 0.875, 0.875]
    page.fill("#filter", "scor<1")
    assert "did you mean score?" in page.inner_text(".problem")
    page.fill("#filter", "nothing has this")
    assert "No row passes" in page.inner_text(".empty")


def test_tokens_have_colours_and_numbers(saved, window):
    page = window.open(saved)
    opened_row(page, 1, 1)
    tokens = page.locator(".token")
    assert tokens.count() == 4
    assert page.locator(".token.off").count() == 1
    assert "dashed" in page.evaluate("getComputedStyle(document.querySelector('.token.off')).outlineStyle")
    colours = {}
    for name in page.locator(".by option").evaluate_all("all => all.map((x) => x.value)"):
        page.select_option(".by select", name)
        colours[name] = tokens.evaluate_all("all => all.map((x) => x.style.background)")
    assert set(colours) >= {"advantages", "ratio", "values", "entropy", "kl", "old_log_probs", ""}
    assert set(colours[""]) == {"transparent"}
    assert len({tuple(x) for x in colours.values()}) > 5
    tokens.nth(0).hover()
    numbers = page.inner_text(".readout")
    for words in ("Advantage", "Ratio", "Value", "Entropy", "Token 1 of 4"):
        assert words in numbers
    tokens.nth(1).focus()
    page.keyboard.press("ArrowRight")
    assert "Token 3 of 4" in page.inner_text(".readout")
    assert "Trained on\nno" in page.inner_text(".readout")


def test_a_group_and_a_prompt_over_steps(saved, window):
    page = window.open(saved)
    opened_row(page, 1, 1)
    assert "Group: 2 responses to this prompt" in page.inner_text(".detail")
    assert "Mean score in 5 steps" in page.inner_text(".detail")
    page.locator(".card").nth(1).click()
    until(page, "location.hash.endsWith('/1/0')")


def test_turns_and_images(saved, window):
    page = window.open(saved)
    opened_row(page, 6, 0)
    turns = page.locator(".turn").all_inner_texts()
    assert [text.split(" ·")[0] for text in turns] == ["Turn 1", "Environment", "Turn 2"]
    assert "reward +1" in turns[2]
    image = page.locator(".images img")
    until(page, "document.querySelector('.images img').naturalWidth === 24")
    assert image.get_attribute("alt") == "image 1"


def test_hostile_texts_stay_texts(saved, window):
    page = window.open(saved)
    for number in range(3):
        opened_row(page, 6, number)
        page.wait_for_timeout(100)
    assert page.evaluate("window.HACKED") is None
    assert page.locator("b:has-text('bold')").count() == 0
    assert view_runs.MARKUP in page.inner_text(".tokens")
    opened_row(page, 6, 0)
    until(page, "document.querySelector('.tokens').innerText.includes('٤٢')")
    assert page.evaluate("getComputedStyle(document.querySelector('.tokens')).unicodeBidi") in ("plaintext", "isolate")
    box = page.evaluate("(() => { const t = document.querySelector('.tokens'); return t.matches(':dir(rtl)') })()")
    assert box is True


def test_a_response_of_100000_characters_is_shown_in_its_box(saved, window):
    page = window.open(saved)
    opened_row(page, 6, 1)
    until(page, "document.querySelector('.tokens').innerText.length > 99999")
    assert (
        page.evaluate("document.querySelector('.tokens').scrollWidth - document.querySelector('.tokens').clientWidth")
        <= 1
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 1360


def test_the_keyboard_alone_suffices(saved, window):
    page = window.open(saved)
    page.keyboard.press("Tab")
    for _ in range(20):
        if page.evaluate("document.activeElement.textContent") == "Rows":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".table")
    page.keyboard.press("/")
    page.keyboard.type("score<0.5")
    page.keyboard.press("Enter")
    page.wait_for_selector(".detail")
    first = page.evaluate("location.hash")
    page.keyboard.press("j")
    until(page, f"location.hash !== '{first}'")
    page.keyboard.press("k")
    until(page, f"location.hash === '{first}'")
    page.keyboard.press("End")
    until(page, "document.querySelector('.row.chosen')?.getAttribute('aria-rowindex') === '25'")
    page.keyboard.press("Home")
    until(page, "document.querySelector('.row.chosen')?.getAttribute('aria-rowindex') === '2'")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('token')"):
            break
    page.keyboard.press("ArrowRight")
    assert "Token 2 of 4" in page.inner_text(".readout")


def test_a_phone_shows_one_thing_at_a_time(saved, window):
    page = window.open(f"{saved}#rows")
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator(".row").first.click()
    page.wait_for_selector(".detail")
    assert page.locator(".list").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click(".back")
    assert page.locator(".list").is_visible()
    for name in ("Overview", "Curves"):
        page.click(f"nav >> text={name}")
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name


def test_texts_can_be_read_in_light_and_dark(saved, window):
    """A contrast of 4.5 between the inks and what is behind them (WCAG AA)."""
    contrast = """names => { const lum = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map((x) => x / 255).map((x) =>
        x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const box = document.body.appendChild(document.createElement('i'));
        const value = (name) => { box.style.color = `var(${name})`; return lum(getComputedStyle(box).color); };
        const [a, b] = names.map(value); box.remove(); return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }"""
    page = window.open(saved)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for ink in ("--ink", "--dim", "--warn", "--accent"):
            for paper in ("--paper", "--panel", "--chosen"):
                assert page.evaluate(contrast, [ink, paper]) >= 4.5, (scheme, ink, paper)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == "rgb(15, 19, 25)"


AUDIT = """async () => (await axe.run({resultTypes: ['violations']})).violations.flatMap((violation) =>
    violation.nodes.map((node) => `${violation.id}: ${node.target} ${node.failureSummary}`))"""


@pytest.mark.parametrize(("scheme", "width"), [("light", 1360), ("dark", 390)])
def test_no_page_breaks_a_rule_of_accessibility(tmp_path, window, scheme, width):
    """The rules of axe-core: WCAG 2 A and AA, and good practice; each page of one run and of two, with an alarm, and
    with all that unfolds."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    run, other = (view_runs.write_run(tmp_path / name, steps=6) for name in ("mine", "other"))
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "actor/ppo_kl": 0.5}}\n' for step in (7, 8, 9))
    for runs in ([run], [run, other]):
        page = window.open(view_page.export(runs, tmp_path / "page.html", most_bytes=1e9).as_uri(), color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 860})
        page.evaluate(axe.axe_script)
        assert page.locator(".warn", has_text="alarm ratio").count() == 1
        for place in ("overview", "curves", "rows", "rows/0/1/1", "rows/0/6/0"):
            page.evaluate(f"location.hash = '{place}'")
            until(page, f"document.body.dataset.page === '{place.partition('/')[0]}'")
            if place.count("/"):
                opened_row(page, *map(int, place.split("/")[2:]))
            page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
            page.wait_for_timeout(100)  # for what unfolds
            assert page.evaluate(AUDIT) == [], (place, len(runs))


def test_runs_lie_over_each_other_with_seeds_as_bands(tmp_path, window):
    runs = [
        view_runs.write_run(tmp_path / f"lr={lr}" / f"seed_{seed}", steps=12, seed=seed, lr=lr, rows=2)
        for lr in (1e-6, 1e-5)
        for seed in (0, 1)
    ]
    page = window.open(f"{view_page.export(runs, tmp_path / 'page.html', most_bytes=1e9).as_uri()}#curves")
    settings = page.inner_text(".differences")
    assert "actor.optimizer.lr" in settings
    assert "2 settings differ" in settings
    reward = page.locator(".chart", has_text="Reward").first
    assert reward.locator(".key").count() == 2
    assert "lr 1e-5, 2 seeds" in reward.inner_text()
    page.uncheck("text=Seeds as bands")
    assert page.locator(".chart", has_text="Reward").first.locator(".key").count() == 4
    page.locator(".run-keys input").first.uncheck()
    assert page.locator(".chart", has_text="Reward").first.locator(".key").count() == 3
    page.check("text=Log scale")
    page.fill(".controls input[type=search]", "entropy")
    assert page.locator(".chart").count() == 1
    page.locator(".chart").focus()
    page.keyboard.press("ArrowLeft")
    assert "step 12" in page.inner_text(".tip")
    page.click("nav >> text=Rows")
    assert page.inner_text("#count") == "96 rows, 48 steps"
    page.fill("#filter", "run=2")
    assert page.inner_text("#count") == "24 of 96 rows"


def test_a_prompt_stands_beside_the_same_of_another_run(tmp_path, window):
    runs = [view_runs.write_run(tmp_path / name, steps=steps) for name, steps in (("mine", 4), ("other", 3))]
    page = window.open(view_page.export(runs, tmp_path / "page.html", most_bytes=1e9).as_uri())
    opened_row(page, 3, 3)
    columns = page.locator(".beside > div")
    assert columns.locator("h4").all_inner_texts() == ["mine", "other"]
    means = [f"step {step} · mean score 0.313" for step in (3, 2)]  # (2/8 + 3/8) / 2
    assert columns.locator(".note").all_inner_texts() == means
    boxes = [columns.nth(number).bounding_box() for number in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] < boxes[1]["x"]
    columns.nth(1).locator(".card").first.click()
    until(page, "location.hash === '#rows/1/2/3'")
    opened_row(page, 4, 3)
    until(page, "document.querySelector('.detail').innerText.includes('No other run has a row with this prompt')")


def test_a_run_that_is_being_written_comes_in_by_itself(tmp_path, window):
    run = tmp_path / "live"
    (run / SAMPLES).mkdir(parents=True)
    with served([run]) as address:
        page = window.open(address)
        assert "Live" in page.inner_text(".status")
        page.click("nav >> text=Rows")
        assert "No rows yet" in page.inner_text(".empty")
        view_runs.write_run(run, steps=2)
        page.wait_for_selector("body[data-rows='16']")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "critic/sco')
        view_runs.write_table(run, 3, view_runs.table(3, 8))
        page.wait_for_selector("body[data-rows='24']")
        opened_row(page, 3, 5)
        assert "Live · step 2" in page.inner_text(".status")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('re/mean": 0.5}\n')
        until(page, "document.querySelector('.status').textContent.includes('step 3')")
        (run / SAMPLES / "000001.parquet").unlink()
        page.wait_for_selector("body[data-rows='16']")
        assert page.evaluate("location.hash") == "#rows/0/3/5"
        page.route("**/states*", lambda route: route.abort())
        until(page, "document.querySelector('.status').textContent.startsWith('No answer')")
    window.errors.clear()  # of the requests that nobody answered


def test_a_damaged_file_of_rows_is_named(tmp_path, window):
    run = view_runs.write_run(tmp_path / "torn", steps=3)
    path = run / SAMPLES / "000002.parquet"
    path.write_bytes(path.read_bytes()[:200])
    page = window.open(f"{view_page.export([run], tmp_path / 'page.html', most_bytes=1e9).as_uri()}#rows")
    assert page.inner_text("#count") == "16 rows, 3 steps"
    assert page.inner_text(".unread") == "torn: no row of step 2 can be read."


def test_a_large_file_is_read_by_ranges(tmp_path, window):
    """A row of a live run whose files are too large to be read at once."""
    run, tokens = tmp_path / "large", 600
    view_runs.write_metrics(run, 1)
    table = view_runs.table(1, 512, tokens=tokens)
    noise = view_runs.lists(np.random.default_rng(0).normal(size=(512, tokens)).astype(np.float32))
    for name in ("ref_log_probs", "token_rewards", "old_log_probs", "rollout_log_probs"):
        table = table.set_column(table.column_names.index(name), name, noise)
    path = view_runs.write_table(run, 1, table)
    assert path.stat().st_size > 2**22
    with served([run]) as address:
        page = window.open(f"{address}#rows")
        ranges = []
        page.on("request", lambda request: ranges.append(request.headers.get("range")))
        opened_row(page, 1, 300)
        assert page.locator(".token").count() == tokens
        spans = [tuple(map(int, each.removeprefix("bytes=").split("-"))) for each in ranges if each]
        assert spans
        page.locator(".token").nth(2).hover()
        wanted = table.column("old_log_probs")[300].as_py()[2]
        assert f"{wanted:.4g}" in page.inner_text(".readout")


def test_a_run_without_rows_says_so(tmp_path, window):
    run = tmp_path / "none"
    run.mkdir()
    view_runs.write_metrics(run, 3)
    page = window.open(view_page.export([run], tmp_path / "page.html", most_bytes=1e9).as_uri())
    assert "Reward in training" in page.inner_text(".overview")
    page.click("nav >> text=Rows")
    assert "No rows yet" in page.inner_text(".empty")


def test_100352_rows_open_and_scroll(tmp_path, window):
    """At most 100 of them are in the page; how long they took is printed (`pytest -s`)."""
    run = tmp_path / "large"
    run.mkdir()
    view_runs.write_metrics(run, 196)
    for step in range(1, 197):
        view_runs.write_table(run, step, view_runs.table(step, 512))
    page = window.open(f"{view_page.export([run], tmp_path / 'page.html', most_bytes=1e9).as_uri()}#rows")
    assert page.inner_text("#count") == "100,352 rows, 196 steps"
    print(f"opened in {page.evaluate('document.body.dataset.opened')} ms")
    scroll = f"""async () => {{ const t = document.querySelector('.table'); let most = 0;
        for (let i = 0; i < 60; i++) {{ t.scrollTop += 40321; await new Promise(requestAnimationFrame);
            most = Math.max(most, {NODES}); }} return most; }}"""
    assert 0 < page.evaluate(scroll) <= 100
    page.fill("#filter", "score<0.1")
    assert page.inner_text("#count") == "10,192 of 100,352 rows"
    page.keyboard.press("Enter")
    page.wait_for_selector(".detail")
