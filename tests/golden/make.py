"""Make the golden files anew: `python -m tests.golden.make [--only logits tokenizer ...]`, from the project's root.

Every make_<part>.py beside this file has `main(out_folder)` and writes its own files. They need the extra `peers`
(torch, transformers); the tests themselves only read what is written here. versions.json says, part by part, which
versions the files were made with.
"""

import argparse
import importlib
import json
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def main() -> None:
    parts = sorted(path.stem.removeprefix("make_") for path in HERE.glob("make_*.py"))
    parser = argparse.ArgumentParser(prog="python -m tests.golden.make", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    versions_file = HERE / "versions.json"
    versions = json.loads(versions_file.read_text()) if versions_file.exists() else {}
    for part in parser.parse_args().only:
        print(f"== {part}", flush=True)
        importlib.import_module(f"tests.golden.make_{part}").main(HERE)
        versions[part] = {package: metadata.version(package) for package in PACKAGES}
        versions_file.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
