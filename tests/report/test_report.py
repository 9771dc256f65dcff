"""What stands on the page, and that it is made from folders alone."""

import ast
import base64
import html
import io
import json
import re
import shlex
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from PIL import Image

import protofed
from protofed.cli import main
from protofed.errors import UserError
from protofed.pages.elements import sheet
from protofed.registry import find_method
from protofed.report import read, render, write_report
from protofed.report.commands import command
from protofed.report.wording import headline

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def text_of(page: str) -> str:
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL))


def test_a_comparison_says_what_its_files_say(compared: Path) -> None:
    content = json.loads((compared / "comparison.json").read_text())
    page = text_of(render(read(compared)))
    for name in ("fedavg", "i2pfl"):
        for part in (
            content["methods"][name]["global"]["average"],
            *content["methods"][name]["global"]["per_domain"].values(),
        ):
            assert f"{100 * part['mean']:.2f}" in page
        assert f"{100 * content['methods'][name]['global']['worst_domain']['mean']:.2f}" in page
    test = content["methods"]["i2pfl"]["global"]["test"]
    assert f"{test['p_holm']:.3f}" in page
    assert "the model each client would use" in page
    for title in (
        "Accuracy",
        "Round by round",
        "Could this be chance?",
        "Communication",
        "Time",
        "Data of each client",
    ):
        assert title in page
    assert content["methods"]["i2pfl"]["knobs"].keys() <= set(re.findall(r"method\.knobs\.(\w+)", page))


def test_the_words_name_the_best_and_the_cheapest(compared: Path) -> None:
    content = json.loads((compared / "comparison.json").read_text())["methods"]
    said = " ".join(headline(read(compared)))
    best = max(("fedavg", "i2pfl"), key=lambda name: content[name]["global"]["average"]["mean"])
    assert f"For the server's model, {best} is best on average" in said
    assert "fedproto sends least" in said


def test_the_command_does_it_again(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command(read(compared)) or "")
    monkeypatch.chdir(tmp_path)
    assert main([*words[1:], "--quiet"]) == 0
    first, again = (json.loads((path / "comparison.json").read_text()) for path in (compared, tmp_path / "again"))
    for name, entry in first["methods"].items():
        assert again["methods"][name]["runs"] == entry["runs"]
        assert again["methods"][name]["personal"]["average"] == entry["personal"]["average"]


def test_a_run_and_one_that_is_not_complete(tiny_run, tmp_path: Path) -> None:
    run = tiny_run("fedavg", rounds=3)
    page = text_of(render(read(run.path)))
    assert f"{100 * run.summary['accuracy']['global']['average']:.2f} % on average over all domains" in page
    assert "Could this be chance?" not in page
    half = tmp_path / "half"
    shutil.copytree(run.path, half)
    (half / "summary.json").unlink()
    lines = (half / "rounds.jsonl").read_text().splitlines(keepends=True)
    (half / "rounds.jsonl").write_text("".join(lines[:2]) + lines[2][:40])
    page = text_of(render(read(half)))
    assert "after 2 of 3 rounds" in page
    assert "not running now" in page
    assert f"protofed run --resume --out {half}" in page
    (half / "rounds.jsonl").write_text("")
    assert "Nothing is finished yet" in render(read(half))


def test_a_run_by_label_shows_its_clients(tiny_run) -> None:
    run = tiny_run("fedproto", protocol="dirichlet=0.5,clients=4")
    page = text_of(render(read(run.path)))
    assert "It is weakest on client-" in page
    for client, entry in run.config["partition"]["clients"].items():
        assert re.search(rf"{client}\s+.*?\b{entry['train']}\b", page, re.DOTALL)


def test_a_reproduction_shows_the_papers_figures(tmp_path: Path) -> None:
    from protofed.studies.tables.reproduce import reproduce
    from protofed.testing import toy_data

    domains = ["caltech", "amazon", "webcam", "dslr"]
    toy_data(tmp_path / "root" / "office_caltech10", domains, classes=10, train=30, test=10, channels=3)
    reproduce(
        "i2pfl.table2", out=tmp_path / "t", data_root=str(tmp_path / "root"), datasets="office_caltech10",
        methods="fedavg,i2pfl", model="mlp", image_size=8, rounds=1, epochs=1, engine="loop",
        set={"model.hidden": 8, "data.augment": "none"},
    )  # fmt: skip
    findings = read(tmp_path / "t")
    page = text_of(render(findings))
    assert "(72.84)" in page
    assert "(66.00)" in page
    words = shlex.split(command(findings) or "")
    assert words[:3] == ["protofed", "reproduce", "i2pfl.table2"]
    assert words[words.index("--methods") : words.index("--methods") + 2] == ["--methods", "fedavg,i2pfl"]
    computed = tmp_path / "c"
    reproduce("conffedproto.table2", out=computed)
    assert "parameters" in text_of(render(read(computed)))


def test_pictures_of_other_commands_are_inside(tiny_run) -> None:
    run = tiny_run("fedavg")
    folder = run.path / "explanations"
    folder.mkdir()
    (folder / "part.png").write_bytes(DOT)
    outside = {"image": "../../secret.png", "caption": "not ours"}
    items = [{"image": "part.png", "caption": "a <part>"}, {"image": "gone.png", "caption": "gone"}, outside]
    table = {"title": "Agreement", "columns": ["client", "agreement"], "rows": [["a-0", 0.5]]}
    index = {"title": "Why it said so", "items": items, "tables": [table], "else": 1}
    (folder / "explanations.json").write_text(json.dumps(index))
    (run.path / "audit").mkdir()
    (run.path / "audit" / "audit.json").write_text("{broken")
    page = render(read(run.path))
    assert f"data:image/png;base64,{base64.b64encode(DOT).decode()}" in page
    assert "Why it said so" in page
    assert "a &lt;part&gt;" in page
    assert "2 more pictures" in page
    assert "Agreement" in page
    assert "not ours" not in page


def test_names_from_data_stay_text(tiny_run, make_data) -> None:
    evil = "</script><script>alert(1)</script>"
    run = tiny_run("fedavg", make_data(("a", "b")))
    config = run.config
    config["data"]["classes"][0] = config["method"]["name"] = evil
    (run.path / "run.json").write_text(json.dumps(config))
    page = render(read(run.path))
    assert "<script>alert" not in page
    assert page.count("</script>") == 2


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(UserError, match="neither"):
        read(tmp_path)
    (tmp_path / "comparison.json").write_text("[")
    with pytest.raises(UserError, match="damaged"):
        read(tmp_path)


def test_from_the_command_line(compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(compared), "--out", str(tmp_path / "sub" / "page.html")]) == 0
    assert (tmp_path / "sub" / "page.html").read_text().startswith("<!doctype html>")
    assert "page.html" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "nowhere")]) == 2


def test_a_large_comparison_stays_small(large: Path) -> None:
    assert write_report(large).stat().st_size < 1_000_000


def test_reading_trains_nothing() -> None:
    """The page is made from what was written: this room uses no other that trains."""
    forbidden = {"run", "compare", "sweep", "pretrain", "assembly", "schedule", "pool", "estimate", "tables"}
    room = Path(protofed.__file__).parent / "report"
    for path in room.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = node.module.split(".")
                assert parts[0] != "torch"
                assert parts[:2] not in (["protofed", "engines"], ["protofed", "method"], ["protofed", "methods"])
                if parts[:2] in (["protofed", "runs"], ["protofed", "studies"]):
                    assert len(parts) > 2
                    assert parts[2] not in forbidden


def test_a_run_says_nothing_twice(tiny_run) -> None:
    """One method, one seed: no words about seeds and the best, no chart that another one is, both views merged."""
    page = text_of(render(read(tiny_run("fedavg").path)))
    for absent in ("lines span the seeds", "is bold", "standard deviation", "Mean over seeds", "sent so far"):
        assert absent not in page
    assert "Accuracy of the server" in page
    assert "Accuracy of the model each client would use" not in page


def test_a_comparison_keeps_what_a_run_leaves_out(compared: Path) -> None:
    page = text_of(render(read(compared)))
    assert "lines span the seeds" in page
    assert "the best of each column is bold" in page


def test_a_line_on_each_method_the_date_and_notes(compared: Path, tmp_path: Path) -> None:
    page = text_of(write_report(compared, tmp_path / "page.html", notes=["Compare <this>", "and that"]).read_text())
    assert "Methods on this page" in page
    for name in read(compared).groups[0].methods:
        assert html.escape(find_method(name).paper) in page
    assert str(datetime.now().year) in page
    assert "Compare &lt;this&gt;" in page
    assert "and that" in page


def test_a_sweep_is_a_page(tmp_path: Path, tiny_data: str) -> None:
    options = {"model": "mlp", "rounds": 1, "batch": 8, "engine": "loop", "set": {"model.hidden": 8}}
    over = {"mu": [0.01, 0.1], "lr": [0.01, 0.1]}
    swept = protofed.sweep("fedprox", over, data=tiny_data, out=tmp_path / "swept", **options)
    page = write_report(swept.path, notes=["first look"]).read_text()
    assert page.count("<svg") == 2, "a chart for each hyper-parameter"
    for row in swept.table().rows:
        assert all(f">{cell}</td>" in page or f">{cell}</th>" in page for cell in row)
    assert "first look" in page
    assert "The winner on test data" in page
    chance = protofed.Run(swept.path / swept.content["trials"][0]["runs"][0]).config["chance"]["global"]["average"]
    assert "chance</th>" in page, "a winner may have learned nothing"
    assert f"<td>{100 * chance:.2f}</td></tr>" in page
    (swept.path / "sweep.json").write_text("[]")
    with pytest.raises(UserError, match="damaged"):
        write_report(swept.path)


def test_the_page_says_which_rounds_an_accuracy_is_of(tiny_run) -> None:
    """Under Metrics stand the final models, which may be far from the mean of the last rounds."""
    said = "the mean of its last 5 scored rounds"
    several, single = tiny_run("fedavg", rounds=3, lr=0.5), tiny_run("fedavg", rounds=1)
    assert several.summary["accuracy"] != several.summary["accuracy_final"]
    assert said in render(read(several.path))
    assert said not in render(read(single.path))


def test_a_picture_with_words_keeps_a_width_at_which_they_can_be_read() -> None:
    wide = Image.new("RGB", (1000, 10))
    file = io.BytesIO()
    wide.save(file, "PNG")
    shown = sheet(file.getvalue(), "what it shows", "a label")
    assert "min-width:720px;max-width:1300px" in shown
    assert 'class="scroll" tabindex="0" role="group" aria-label="a label"' in shown
    assert 'alt="what it shows"' in shown


def test_one_exchange_is_a_warning_only_to_who_asked_for_more(tiny_run) -> None:
    warned = tiny_run("fedncm", rounds=3).config["warnings"]
    assert any("ends after one exchange" in text for text in warned)
    assert not any("one exchange" in text for text in tiny_run("fedncm", rounds=10).config["warnings"])
