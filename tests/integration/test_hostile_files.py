"""Hostile run folders, outputs that cannot be written, numbers like 1e308: one line, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.runs import cli, run

START = {
    "date": "2026-01-02", "round": 0, "command": "fit", "versions": {}, "engine": None, "precision": "32-true",
    "code": {},
    "machine": {"system": "L", "cpu": "C", "cores": 1, "threads": 1, "device": "cpu", "processes": 1},
}  # fmt: skip
MEASURED = {"name": "x", "round": 1, "value": 1.0, "error": None, "residual": None, "model": "m", "data": "d"} | {
    "samples": 1, "settings": {}, "details": {},
}  # fmt: skip
FLAT = "round,server/test/acc\n"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("fit", root=tmp_path_factory.mktemp("good"))


def line_of(*args: str) -> str:
    """Returns the one line that a command ends with."""
    with pytest.raises(SystemExit) as exit:
        cli(*args)
    text = str(exit.value.code)
    assert text.startswith("error: ") and "\n" not in text
    return text


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("provenance.json", text) for text in ("[]", '"x"', "null", "{}", "[" * 100_000, '{"starts": [{}]}')),
        ("provenance.json", json.dumps({"starts": [{**START, "machine": 5}], "changes": {}})),
        ("provenance.json", json.dumps({"starts": [START], "changes": {"a": 5}})),
        *(("partition.json", text) for text in ("5", '{"clients": "x"}')),
        ("partition.json", '{"clients": 5, "classes": 10, "counts": []}'),
        ("partition.json", '{"clients": 5, "classes": 1000000000, "counts": [{}]}'),
        ("partition.json", '{"clients": 5, "classes": 2, "counts": [{"0": "x"}]}'),
        ("partition.json", '{"clients": 5, "classes": 2, "counts": [{"0": 1}], "names": ["a"]}'),
        *(("flatness.jsonl", text) for text in ("[]\n", '{"name": 5}\n', "[" * 100_000 + "\n", "\x00\n")),
        ("flatness.jsonl", json.dumps({**MEASURED, "value": "a"}) + "\n"),
        ("flatness.jsonl", json.dumps({**MEASURED, "details": {"eigenvalues": ["a"]}}) + "\n"),
        ("flatness.jsonl", json.dumps({**MEASURED, "details": {"grid": [1, 2], "density": [1]}}) + "\n"),
        *(
            ("flatness/flatness.json", text)
            for text in ("[]", '{"measurements": 5}', '{"round": 1, "measurements": [{}]}')
        ),
        *(
            ("reproduction.json", text)
            for text in ("5", "[[]]", '{"a": {}}', '[{"paper": ["x"]}]', '[{"fraction": "x"}]', '{"paper": "x"}')
        ),
        ("client_evaluation.csv", "client,acc\n1,x\n"),
        ("directions.json", "[]"),
        ("metrics.csv", FLAT + "1,1e308\n2,-1e308\n"),
        ("metrics.csv", FLAT + "1,x\n"),
        ("metrics.csv", FLAT + "1" + "0" * 400 + ",0.5\n"),
        ("config.yaml", "trainer: {seed: [1]}\ndata: {init_args: {seed: {}}}\nmodel: 1\n"),
        ("config.yaml", "a: " + "[" * 3000),
        ("config.yaml", "a: 2026-99-99"),
        *(("config.yaml", text) for text in ("trainer: {1: x, a: y}", "5: x\nnull: y")),
        ("landscape/a.png/b", ""),
        ("config_round_1.yaml/b", ""),
    ],
)
def test_report_refuses_a_hostile_run_folder(
    file: str, content: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r/version_0"
    shutil.copytree(good, folder)
    (folder / file).parent.mkdir(exist_ok=True, parents=True)
    (folder / file).write_text(content)
    monkeypatch.chdir(tmp_path)
    line_of("report", "r", "--out", "report")
    assert not Path("report").exists()


def test_a_damaged_config_is_said_when_it_is_resumed(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoint knows the settings: a bit of the file that has flipped does not change them in silence."""
    folder = tmp_path / "r/version_0"
    shutil.copytree(good, folder)
    monkeypatch.chdir(tmp_path)
    text = (folder / "config.yaml").read_text()
    assert text.count("    batch_size: 32\n") == 1
    (folder / "config.yaml").write_text(text.replace("    batch_size: 32\n", "    batch_size: 36\n"))
    cli("fit", f"--ckpt_path={folder / 'checkpoints/last.ckpt'}", "--trainer.max_rounds=3")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("settings changed after round 2")]
    assert len(lines) == 1 and "data.batch_size: 32 -> 36" in lines[0]


@pytest.mark.parametrize("file", ["metrics.csv", "summary.json"])
def test_compare_of_other_files(file: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is a link to nothing, the other has statistics of another form, in a run from Python."""
    folder = tmp_path / "r"
    shutil.copytree(good, folder)
    monkeypatch.chdir(tmp_path)
    if file == "metrics.csv":
        (folder / file).unlink()
        (folder / file).symlink_to("nothing")
        assert "check this file or folder" in line_of("compare", "r")
    else:
        (folder / "config.yaml").unlink()
        (folder / file).write_text("[]")
        assert "not what a run writes there" in line_of("compare", "r")


@pytest.mark.sampled(quick=6, slow=2)
@pytest.mark.parametrize("out", ["/proc/x", "file", "file/x", "x" * 300])
@pytest.mark.parametrize("command", ["compare", "report", "export", "init", "sweep"])
def test_outputs_that_cannot_be_written(
    command: str, out: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("sweep.yaml").write_text(json.dumps({
        "method": "grid", "parameters": {"trainer.seed": {"values": [0]}},
        "command": ["fl-lightning", "fit", "--config", "quickstart", "${args}"],
    }))  # fmt: skip
    ckpt = str(good / "checkpoints/last.ckpt")
    args = {
        "compare": [str(good), "--out", out], "report": [str(good), "--out", out], "export": [ckpt, f"{out}/x.pt"],
        "init": [out], "sweep": ["sweep.yaml", "--out", out],
    }  # fmt: skip
    line_of(command, *args[command])
    assert Path("file").read_text() == "x" and {path.name for path in Path.cwd().iterdir()} == {"file", "sweep.yaml"}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("command", "name"), [("compare", "compare.tex"), ("report", "curves.pdf"), ("report", "report.html")]
)
def test_a_folder_where_a_file_should_be(command: str, name: str, good: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    assert "cannot be written over a folder" in line_of(command, str(good), "--out", str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "fit --config quickstart --data.partition=FLSAMPath --data.partition.shards=99999",
            "data.partition.shards = 99999: ",
        ),
        ("fit --config quickstart --model.optimizer.weight_decay=1e308", "weight_decay = 1e+308: give a finite number"),
        ("fit --config quickstart --trainer.aggregation=Aggregation", "trainer.aggregation = Aggregation: give a rule"),
        ("fit --config /proc/self/mem", "check this file or folder"),
        ("reproduce fedsam 1 --dry-run --jobs 0", "jobs = 0: give a whole number of at least 1"),
        ("compare runs --lst 3", "lst = 3: no such option (did you mean --last?); see `fl-lightning compare --help`"),
        ("configs --all", "all: no such option; choose from --folder; see `fl-lightning configs --help`"),
        ("fit --config quickstart --ckpt_pth x", "ckpt_pth = x: no such option (did you mean --ckpt_path?)"),
        ("fit --config quickstart --trainer.aggregation median", "did you mean CoordinateMedian"),
        ("fit --config quickstart --trainer.privacy Foo", "choose from AdaptivePrivacy, GaussianPrivacy"),
        ("sweep quickstart", "quickstart.yaml: no sweep, it has no parameters; give a file such as sweeps/digits"),
        ("export no.ckpt out.pt", "ckpt = no.ckpt: no such file; give a checkpoint"),
        ("flatness --ckpt_path /etc/hostname", "ckpt_path = /etc/hostname: no config.yaml of its run lies above it"),
    ],
)
def test_runaways_are_refused_first(args: str, message: str) -> None:
    assert message in line_of(*args.split())


@pytest.mark.parametrize("command", ["compare", "fit", "sweep", "test"])
def test_names_that_write_on_the_terminal(command: str) -> None:
    """Newlines and a terminal's codes are shown as escapes, as is a byte that is no text."""
    arg = "a\nb\x1b[31m\udcff"
    assert "a\\nb\\x1b[31m\\udcff" in line_of(command, *(["--config"] if command in ("fit", "test") else []), arg)
    assert "a\\nb" in line_of(arg)


@pytest.mark.parametrize("value", ["!!timestamp x", "!!bool x", "!!int x", "9" * 5000, "\udcff"])
def test_values_that_yaml_cannot_make(value: str) -> None:
    line = line_of("fit", "--config=quickstart", f"--trainer.max_rounds={value}")
    assert line.startswith(
        f"error: trainer.max_rounds = {value[:60].encode('unicode_escape').decode()}: no value of YAML"
    )


@pytest.mark.parametrize(
    "entries",
    [
        {"name": "a\0b"}, {"name": "x" * 300}, {"run_cap": 10**9},
        {"parameters": {"trainer.seed": {"distribution": "int_uniform", "min": 0, "max": 10**30}}},
    ],
)  # fmt: skip
def test_sweeps_without_bounds(entries: dict[str, object], tmp_path: Path) -> None:
    sweep = {
        "method": "grid",
        "parameters": {"trainer.seed": {"values": [0]}},
        "command": ["fit", "${args}"],
        **entries,
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    line_of("sweep", str(tmp_path / "sweep.yaml"))
