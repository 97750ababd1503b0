"""Every benchmark runs; what it measures is for its reader to see."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in ("__init__", "harness"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_quick_run_prints_a_table_and_writes_its_figures(script, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{script}", "--quick", "--json", tmp_path / "figures.json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["rows"] and figures["machine"]["numpy"] in run.stdout
    for row in figures["rows"]:
        assert all(str(value) in run.stdout or isinstance(value, float) for value in row.values())
        assert all(value > 0 for name, value in row.items() if name.startswith("ms "))
