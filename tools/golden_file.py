"""The files in `crates/dtensor-tests/tests/golden`: PyTorch's own answers, which the tests compare with.

The programs beside this one compute them. Each takes the same arguments:

    python tools/golden.py                     # rewrites its file
    python tools/golden.py --only add --only t # rewrites only the cases of these names
    python tools/golden.py --check             # computes everything again, and fails if the file says anything else

A file holds the version of PyTorch and one or more lists of cases, one case per line. The first field of a case is its name, which
several cases may share. A file has the answers of one version of PyTorch, `PYTORCH` below; any other is an error. Any Python will do,
and a CPU build of PyTorch suffices. `golden_fsdp.py` needs `numpy` and `expecttest` as well.
"""

import argparse
import json
import math
import os
import re
import sys
from collections import Counter, defaultdict

PYTORCH = "2.15.0"


def pytorch():
    """Imports PyTorch, or ends the program with an error if it is missing or of another version."""
    install = f"install it with: pip install torch=={PYTORCH}"
    try:
        import torch
    except ImportError:
        sys.exit(f"golden values need PyTorch, which {sys.executable} does not have; {install}")
    found = torch.__version__.split("+")[0]
    if found != PYTORCH:
        sys.exit(f"golden values are those of PyTorch {PYTORCH}, but {sys.executable} has {torch.__version__}; {install}")
    return torch


torch = pytorch()
FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "crates", "dtensor-tests", "tests", "golden")


def name_of(line):
    return next(iter(json.loads(line).values()))


class File:
    """A file of golden values while its cases are computed."""

    def __init__(self, file, description):
        parser = argparse.ArgumentParser(description=description.splitlines()[0])
        parser.add_argument("--only", action="append", metavar="NAME", help="only the cases of this name")
        parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
        arguments = parser.parse_args()
        self.only, self.check = arguments.only, arguments.check
        self.path = os.path.join(FOLDER, file)
        self.lists = {}
        self.names = set()
        self.old = self.read() if self.only or self.check else {}

    def read(self):
        """Returns the lines of each list, by name."""
        with open(self.path) as file:
            lines = file.read().splitlines()
        version = json.loads(lines[0].rstrip(",") + "}").get("torch") if lines[0].startswith('{"torch"') else None
        if version != PYTORCH:
            sys.exit(f"{self.path} has values of PyTorch {version}, not {PYTORCH}; rewrite all of it, without --only")
        lists = {}
        for line in lines[1:]:
            if heading := re.fullmatch(r'"(\w+)": \[', line):
                found = lists.setdefault(heading[1], defaultdict(list))
            elif line.startswith("{"):
                line = line.rstrip(",")
                found[name_of(line)].append(line)
        return lists

    def wants(self, name):
        return not self.only or name in self.only

    def case(self, name, compute, among="cases"):
        """Adds a case to a list: the fields, or the line of JSON, that `compute` returns. Calls it only if the case is asked for."""
        self.names.add(name)
        line = compute() if self.wants(name) else None
        if line is not None and not isinstance(line, str):
            line = json.dumps(line, separators=(",", ":"))
        assert line is None or name_of(line) == name, (name, line)
        self.lists.setdefault(among, []).append((name, line))

    def finish(self):
        """Writes the file, or compares with it."""
        unknown = set(self.only or ()) - self.names
        if unknown:
            sys.exit(f"no case has the name {', '.join(sorted(unknown))}")
        if self.check:
            return self.compare()
        text = [f'{{"torch": "{PYTORCH}"']
        for heading, cases in self.lists.items():
            kept = {name: iter(lines) for name, lines in self.old.get(heading, {}).items()}
            lines = [line or next(kept.get(name, iter(())), None) for name, line in cases]
            left = {name for name, rest in kept.items() if not self.wants(name) and next(rest, None)}
            left |= {name for (name, _), line in zip(cases, lines) if line is None}
            if left:
                sys.exit(f"the number of cases has changed; add --only {' --only '.join(sorted(left))}")
            text.append(f'"{heading}": [\n' + ",\n".join(lines) + "\n]")
        text = ",\n".join(text) + "}\n"
        json.loads(text)
        with open(self.path, "w") as file:
            file.write(text)
        print(f"{sum(map(len, self.lists.values()))} cases, {len(text)} bytes", file=sys.stderr)

    def compare(self):
        """Lists the cases that differ from those in the file by more than the rounding of another processor."""
        differing = Counter()
        for heading, cases in self.lists.items():
            new = defaultdict(list)
            for name, line in cases:
                if line is not None:
                    new[name].append(line)
            old = self.old.get(heading, {})
            for name in {*new, *(name for name in old if self.wants(name))}:
                a, b = old.get(name, []), new.get(name, [])
                changed = sum(not close(json.loads(x), json.loads(y)) for x, y in zip(a, b))
                differing[name] += changed + abs(len(a) - len(b))
        differing = +differing
        for name, n in sorted(differing.items()):
            print(f"{name}: {n} cases differ", file=sys.stderr)
        if differing:
            sys.exit(f"{self.path} does not have the values of PyTorch {PYTORCH}")
        print(f"{self.path} has the values of PyTorch {PYTORCH}", file=sys.stderr)


def close(a, b):
    """Compares two values of JSON, numbers up to rounding. A tensor of half precision may differ in its last bit."""
    if isinstance(a, list) and isinstance(b, list):
        halves = len(a) == 3 and a[0] in ("f16", "bf16") and a[:2] == b[:2]
        if halves:
            return all(near(x, y, 1e-2) for x, y in zip(a[2], b[2])) and len(a[2]) == len(b[2])
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    return near(a, b, 1e-5)


def near(a, b, tolerance):
    try:
        return a == b or math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
    except (TypeError, ValueError):
        return False
