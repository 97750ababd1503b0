"""Every benchmark, one after the other, each in a process of its own.

python -m benchmarks.all --quick
python -m benchmarks.all --readme       a full run; writes the figures of benchmarks/README.md and its plot
"""

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT, Parser, cell, duration

SCRIPTS = ("decode", "kv_cache", "beam", "speculative", "sampler", "startup", "peers")
README = ROOT / "benchmarks" / "README.md"


def markdown(figures):
    """The figures of README.md, as two tables. figures: name of a script -> what it wrote with --json."""
    peers = figures["peers"]
    engines = [row["case"] for row in peers["tables"][0]["rows"]]
    lines = [f"| {peers['title']}, ms | {' | '.join(engines)} |", "|---" * (len(engines) + 1) + "|"]
    for table in peers["tables"]:
        times = [row["ms"] for row in table["rows"]]
        cells = [f"**{cell(ms)}**" if ms == min(times) else cell(ms) for ms in times]
        lines.append(f"| {table['title']} | {' | '.join(cells)} |")
    lines += [
        "",
        "; ".join([peers["machine"], *peers["notes"]]),
        "",
        "| idea | what it shows | from |",
        "|---|---|---|",
    ]
    for script, written in figures.items():
        ideas = [table for table in written["tables"] if table["idea"]]
        lines += [f"| {table['idea']} | {table['shows']} | `{script}`: {table['title']} |" for table in ideas]
    return "\n".join(lines)


def main(arguments=None):
    options = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    options.add_argument("--quick", action="store_true", help="shows that they run, not how fast")
    options.add_argument("--json", type=Path, metavar="FOLDER", help="write each one's figures to FOLDER/NAME.json")
    options.add_argument("--readme", action="store_true", help="write the figures of benchmarks/README.md and its plot")
    arguments = options.parse_args(arguments)
    seconds = [importlib.import_module(f"benchmarks.{script}").SECONDS for script in SCRIPTS]
    print(f"takes about {duration(sum(x['quick' if arguments.quick else 'full'] for x in seconds))} on two cores")

    failed, figures = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.json or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for script in SCRIPTS:
            file = folder / f"{script}.json"
            command = [sys.executable, "-m", f"benchmarks.{script}", *(["--quick"] if arguments.quick else [])]
            if arguments.readme and script == "kv_cache":
                command += ["--plot", ROOT / "docs" / "figures" / "kv_cache.png"]
            print(f"\n== {script}", flush=True)
            if subprocess.run([*command, "--json", file], cwd=ROOT).returncode:
                failed.append(script)
            else:
                figures[script] = json.loads(file.read_text())
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    elif arguments.readme:
        before, mark, _ = README.read_text().partition("<!-- figures: what follows is written by the command above -->")
        README.write_text(f"{before}{mark}\n\n{markdown(figures)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
