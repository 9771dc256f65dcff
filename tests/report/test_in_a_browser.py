"""The page as a reader has it: in a real browser, wide and narrow, light and dark."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from browser import PROGRAM, WHY_NOT, Browser, Tab, started

from protofed.report import write_report

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)

# Contrast of every piece of text with what is painted behind it, after WCAG 2; the five worst.
CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = (c) => c.slice(0, 3).map(linear)
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const found = rgba(getComputedStyle(e).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const worst = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest("script, style, .skip")) continue;
    const style = getComputedStyle(element);
    const paint = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(rgba(paint)), light(behind(element))];
    worst.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), walker.currentNode.textContent.trim().slice(0, 40)]);
  }
  return worst.sort((a, b) => a[0] - b[0]).slice(0, 5);
})()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as running:
        yield running


@pytest.fixture(scope="module")
def page(compared: Path) -> str:
    return write_report(compared).as_uri()


def open_page(browser: Browser, address: str, **look: object) -> Tab:
    tab = Tab(browser, **look)  # type: ignore[arg-type]
    tab.open(address)
    return tab


def test_it_opens_quietly_and_asks_for_nothing(browser: Browser, page: str) -> None:
    tab = open_page(browser, page)
    assert tab.complaints() == []
    assert tab.requests() == [page]
    plots = tab.run("[...document.querySelectorAll('[data-chart]')].map(p => p.querySelectorAll('.mark').length)")
    assert len(plots) >= 5
    assert all(plots), "every chart is drawn"
    assert tab.run("document.querySelectorAll('.plot .line').length") >= 4


def test_switching_a_method_changes_charts_and_tables(browser: Browser, page: str) -> None:
    tab = open_page(browser, page)
    count = "document.querySelectorAll('.plot [data-method=\"1\"]').length"
    rows = "[...document.querySelectorAll('tr[data-method=\"1\"]')].filter(r => r.checkVisibility()).length"
    drawn = "document.querySelectorAll('.square [data-method=\"1\"]')"
    lines = f"[...{drawn}].filter(r => getComputedStyle(r).display !== 'none').length"
    assert tab.run(count) > 0
    assert tab.run(rows) > 0
    assert tab.run(lines) > 0
    tab.run("document.querySelector('[data-switch=\"1\"]').click()")
    assert tab.run(count) == 0
    assert tab.run(rows) == 0
    assert tab.run(lines) == 0
    assert "i2pfl" in tab.run("location.hash")

    # The address is what a colleague gets.
    other = open_page(browser, page + tab.run("location.hash"))
    assert other.run("document.querySelector('[data-switch=\"1\"]').checked") is False
    assert other.run(count) == 0
    other.run("document.querySelector('[data-all=all]').click()")
    assert other.run(count) > 0
    other.run("document.querySelector('[data-all=none]').click()")
    assert "No method is switched on" in other.run("document.querySelector('[data-chart=curves]').textContent")
    assert other.complaints() == []


def test_another_measure_is_another_curve(browser: Browser, page: str) -> None:
    tab = open_page(browser, page)
    line = "document.querySelector('[data-chart=curves] .line').getAttribute('d')"
    before = tab.run(line)
    tab.run(
        "(() => { const s = document.querySelector('[data-measure]'); s.value = 'loss';"
        " s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    assert tab.run(line) != before


def test_by_keyboard_and_for_a_screen_reader(browser: Browser, page: str) -> None:
    tab = open_page(browser, page)
    tab.run("document.querySelector('[data-chart=curves] svg').focus()")
    tab.press("ArrowLeft")
    tab.press("ArrowLeft")
    said = tab.run("document.querySelector('[data-chart=curves] [role=status]').textContent")
    assert said.startswith("round 2")
    assert "fedavg" in said
    assert tab.run("[...document.querySelectorAll('svg[role=img]')].every(s => s.getAttribute('aria-label'))")
    assert tab.run("[...document.querySelectorAll('table')].every(t => t.caption && t.querySelector('th[scope]'))")
    levels = tab.run("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = tab.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(set(ids)) == len(ids)
    tab.run("document.querySelector('nav a[href=\"#time\"]').click()")
    assert tab.run("document.activeElement.id") == "time-title"


@pytest.mark.parametrize("width", [375, 1200])
def test_nothing_is_wider_than_the_window(browser: Browser, page: str, width: int) -> None:
    tab = open_page(browser, page, width=width, height=800)
    tab.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert tab.run("document.documentElement.scrollWidth") <= width
    over = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .hidden-text') && e.getBoundingClientRect().right > innerWidth + 1).length"  # noqa: E501
    assert tab.run(over) == 0


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_light_and_dark(browser: Browser, page: str, dark: bool) -> None:
    tab = open_page(browser, page, dark=dark)
    tab.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    worst = tab.run(CONTRAST)
    assert worst[0][0] >= 4.5, worst
    before = tab.run("getComputedStyle(document.body).backgroundColor")
    tab.run("document.getElementById('theme').click()")
    assert tab.run("getComputedStyle(document.body).backgroundColor") != before
    worst = tab.run(CONTRAST)
    assert worst[0][0] >= 4.5, worst


def test_lines_differ_in_more_than_colour(browser: Browser, page: str) -> None:
    tab = open_page(browser, page)
    looks = tab.run(
        "[...document.querySelectorAll('.switches .key svg')].map(s =>"
        " [s.querySelector('line').getAttribute('stroke-dasharray'), s.querySelector('path').getAttribute('d')].join())"
    )
    assert len(set(looks)) == len(looks) == 3


def test_without_scripts_the_figures_are_there(browser: Browser, page: str) -> None:
    tab = Tab(browser)
    tab.ask("Emulation.setScriptExecutionDisabled", value=True)
    tab.open(page)
    tab.ask("Emulation.setScriptExecutionDisabled", value=False)
    assert tab.run("document.querySelector('table').checkVisibility()")
    assert tab.run("!document.querySelector('.switches').checkVisibility()")


def test_a_large_comparison_opens_at_once(browser: Browser, large: Path) -> None:
    path = write_report(large)
    assert path.stat().st_size < 6_000_000
    tab = Tab(browser)
    tab.ask("Performance.enable", timeDomain="threadTicks")  # what else the machine does is not the page's
    tab.open(path.as_uri())
    assert tab.run("document.querySelectorAll('[data-chart=curves] .line').length") == 9
    (seconds,) = (
        each["value"] for each in tab.ask("Performance.getMetrics")["metrics"] if each["name"] == "TaskDuration"
    )
    assert 0 < seconds < 2.0
    assert tab.complaints() == []
