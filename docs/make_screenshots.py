"""Takes the pictures of docs/pages.md anew: `python docs/make_screenshots.py [--axe axe.min.js] [--only NAME]`.

By hand, since it needs a browser (chromium) and the package playwright, and trains for some minutes. Runs are on the
embedded digits or on generated lesions, so that the pictures may be shown to anybody. Runs that are there are not
repeated; remove build/screenshots to begin again. With --axe every page is also checked by axe-core (npm install
axe-core), light, dark and as narrow as a phone, and the script fails where a finding is serious or critical.
"""

import argparse
import io
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from PIL import Image

from protofed.report.server import ReportServer
from protofed.studies.tables.results_page import write_page

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "screenshots"
PICTURES = ROOT / "docs" / "screenshots"

DIGITS = "--data digits --samples-per-client 300 --rounds 10 --epochs 3 --lr 0.05"
LOCAL = "--data lesions --model resnet10 --set model.width=16 --set model.local=on --batch 16"
COMMANDS = {
    "compared": f"compare fedavg i2pfl {DIGITS} --seeds 0,1 --out compared",
    "run": f"run i2pfl {DIGITS} --keep-messages --snapshot-rounds 0,5 --out run",
    "run/audit": "audit run --steps 60",
    "run/embeddings": "embed run --samples 400 --out run/embeddings",
    "swept": "sweep fedavg --data digits --samples-per-client 200 --rounds 6 --epochs 3 --over lr=0.02,0.05,0.1 "
    "--over momentum=0.5,0.9 --out swept",
    "table": "reproduce conffedproto.table1 --datasets mnist --columns alpha=0.5 --methods fedavg,conffedproto "
    "--seeds 0 --rounds 4 --out table",
    "backbone.safetensors": f"pretrain {LOCAL} --domains atlas --optimizer adam --lr 0.003 --schedule cosine "
    "--samples-per-client 480 --epochs 10 --out backbone.safetensors",
    "parts": f"run fedadapterproto {LOCAL} --domains amber,rose,olive --weights backbone.safetensors "
    "--set prototype_dim=32 --samples-per-client 240 --rounds 4 --out parts",
    "parts/explanations": "explain parts --domain amber --label diseased --count 2 --faithfulness",
    "ridge": f"run protoridge {LOCAL} --domains amber,rose,olive --weights backbone.safetensors --set tune=temperature "
    "--out ridge",
    "ridge/explanations": "explain ridge --domain amber --label diseased --count 2 --shifts 2",
    "digits.data.html": "data digits --out digits.data.html",
    "compared/report.html": "report compared",
    "run/report.html": "report run",
    "swept/report.html": "report swept",
    "table/report.html": "report table",
}
"""What a command makes, and the command."""
WATCHED = f"run fedavg {DIGITS} --rounds 200 --out watched"
PAGES = {
    "comparison": "compared/report.html",
    "run": "run/report.html",
    "sweep": "swept/report.html",
    "reproduction": "table/report.html",
    "tables": "tables.html",
    "explanations": "parts/explanations/index.html",
    "exact-evidence": "ridge/explanations/index.html",
    "embeddings": "run/embeddings/index.html",
    "audit": "run/audit/index.html",
    "data": "digits.data.html",
}
LOOKS = {"light": (1000, 900, "light"), "dark": (1000, 900, "dark"), "phone": (375, 812, "light")}


def make_pages() -> None:
    """Run what is not there yet."""
    WORK.mkdir(parents=True, exist_ok=True)
    for made, command in COMMANDS.items():
        if not (WORK / made).exists():
            print("protofed", command, flush=True)
            subprocess.run(_words(command), cwd=WORK, check=True, stdout=subprocess.DEVNULL)
    write_page(ROOT / "docs" / "results" / "data", WORK / "tables.html", [], [])


def _words(command: str) -> list[str]:
    return [sys.executable, "-m", "protofed", *command.split()]


@contextmanager
def watched() -> Iterator[str]:
    """The address of the live page of a run that has done some rounds."""
    rounds = WORK / "watched" / "rounds.jsonl"
    resumed = "run --resume --out watched" if rounds.exists() else WATCHED
    with subprocess.Popen(_words(resumed), cwd=WORK, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        before = len(rounds.read_text().splitlines()) if rounds.exists() else 0
        while run.poll() is None and (not rounds.exists() or len(rounds.read_text().splitlines()) < before + 4):
            time.sleep(0.5)
        server = ReportServer(WORK / "watched")
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.address
        server.shutdown()
        run.terminate()


def main() -> None:
    """Make the pages, then look at each in three ways."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axe", type=Path, help="axe.min.js of axe-core, to check every page with")
    parser.add_argument("--only", help="the name of one page")
    parser.add_argument("--browser", default="/usr/bin/chromium", help="the browser's program")
    asked = parser.parse_args()
    make_pages()
    PICTURES.mkdir(exist_ok=True)
    addresses = {name: (WORK / page).as_uri() for name, page in PAGES.items()}
    check = asked.axe.read_text() if asked.axe else None
    with watched() as address, sync_playwright() as play:
        addresses = {"watch": address, **addresses}  # first, while it trains
        browser = play.chromium.launch(executable_path=asked.browser, args=["--no-sandbox"])
        found = [
            line
            for name, page in addresses.items()
            if asked.only in (None, name)
            for look in LOOKS
            for line in picture(browser, page, name, look, check)
        ]
        browser.close()
    print("\n".join(found) or ("axe-core found nothing" if check else ""))
    if any(word in line for line in found for word in ("serious", "critical")):
        sys.exit(1)


def picture(browser: object, address: str, name: str, look: str, check: str | None) -> list[str]:
    """Take one picture; what axe-core finds on the page, a line each."""
    width, height, scheme = LOOKS[look]
    context = browser.new_context(  # type: ignore[attr-defined]
        viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(300)
    png = page.screenshot()
    Image.open(io.BytesIO(png)).convert("RGB").save(PICTURES / f"{name}-{look}.webp", quality=70, method=6)
    found = []
    if check is not None:
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        page.evaluate(check)
        violations = page.evaluate("axe.run().then((result) => result.violations)")
        found = [f"{name}, {look}: {each['impact']} {each['id']}, {len(each['nodes'])} places" for each in violations]
    context.close()
    return found


if __name__ == "__main__":
    main()
