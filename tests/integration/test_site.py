"""The site builds, asks no other host, and is whole in a browser: formulas are typeset and nothing is cut."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """<!doctype html><body><script>
const pages = %s, found = [];
const wait = () => new Promise(done => setTimeout(done, 50));
const look = page => new Promise(done => {
  const frame = Object.assign(document.createElement("iframe"), {src: page, width: 1300, height: 900});
  frame.onload = async () => {
    for (const width of [1300, 420]) {
      frame.width = width;
      await wait();
      const inside = frame.contentDocument, root = inside.documentElement;
      await inside.fonts.ready;
      const faces = [...inside.fonts].filter(f => f.status !== "error").map(f => f.family);
      const used = [...inside.querySelectorAll(".katex *")].map(e => getComputedStyle(e).fontFamily.split(",")[0]);
      const missing = [...new Set(used)].filter(family => family.includes("KaTeX") && !faces.includes(family));
      const raw = [...inside.querySelectorAll(".arithmatex")].filter(f => !f.querySelector(".katex"));
      found.push({page, missing, width: root.clientWidth, overflow: root.scrollWidth - root.clientWidth,
        raw: raw.map(f => f.textContent), errors: [...inside.querySelectorAll(".katex-error")].map(e => e.title),
        formulas: inside.querySelectorAll(".katex").length});
    }
    frame.remove();
    done();
  };
  document.body.append(frame);
});
(async () => {
  for (const page of pages) await look(page);
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
})();
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("site")  # the site is written beside the config
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    for file in ("mkdocs.yml", "Makefile"):
        shutil.copy(ROOT / file, folder)
    command = ["make", "docs", f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.installed-dev"]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return folder / "site"


def pages(site: Path) -> list[Path]:
    return [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]


@pytest.mark.long
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    assert len(pages(site)) > 30
    for page in pages(site):
        loads = re.findall(r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="?(\w+:)?//', page.read_text())
        assert not loads, f"{page.relative_to(site)} loads {loads} from another host"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_pages_are_whole_in_a_browser(site: Path) -> None:
    probe = site / "probe.html"
    probe.write_text(PROBE % json.dumps([str(page.relative_to(site)) for page in pages(site)]))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    command = [str(CHROMIUM), *flags, "--virtual-time-budget=300000", "--window-size=1400,1000", probe.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    measurements = json.loads(html.unescape(re.findall("FOUND(.*)END", dom, re.DOTALL)[0]))
    assert len(measurements) == 2 * len(pages(site)) - 2 and sum(page["formulas"] for page in measurements) > 400
    assert [page["width"] < 500 for page in measurements] == [False, True] * (len(measurements) // 2)
    wrong = ("errors", "raw", "missing")
    assert [page for page in measurements if page["overflow"] > 0 or any(page[key] for key in wrong)] == []
