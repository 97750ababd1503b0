"""Runs every benchmark, one after the other, each in a process of its own.

    python -m benchmarks.all --quick

Exits with 1 where one of them fails, after the others have run.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT, Parser

NOT_SCRIPTS = ("__init__", "all", "engines", "harness")
SCRIPTS = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in NOT_SCRIPTS)


def main(arguments=None):
    options = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    options.add_argument("--quick", action="store_true", help="shows that they run, not how fast")
    options.add_argument("--json", type=Path, metavar="FOLDER", help="write each one's figures to FOLDER/NAME.json")
    arguments = options.parse_args(arguments)

    failed = []
    for script in SCRIPTS:
        command = [sys.executable, "-m", f"benchmarks.{script}", *(["--quick"] if arguments.quick else [])]
        if arguments.json:
            arguments.json.mkdir(parents=True, exist_ok=True)
            command += ["--json", arguments.json / f"{script}.json"]
        print(f"\n== {script}", flush=True)
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(script)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
