"""Functions that the parts of `bench/peers` share: the build of granary, progress, numbers in tables."""

import argparse
import json
import os
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def target_directory():
    """The directory of cargo's build results."""
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    metadata = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE)
    if metadata.returncode != 0:
        sys.exit("bench/peers: cargo metadata failed; see its message above")
    return json.loads(metadata.stdout)["target_directory"]


def granary_path():
    """The path of the release build of the command."""
    return os.path.join(target_directory(), "release", "granary")


def build(*packages):
    """Builds packages of this repository with cargo, optimised."""
    print(f"building {' and '.join(packages)} (release)", file=sys.stderr)
    command = ["cargo", "build", "--release"]
    for package in packages:
        command += ["-p", package]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        sys.exit("bench/peers: the build of granary failed; see cargo's message above")


def show_progress(text):
    """Shows progress: on a terminal as one line that changes, otherwise as separate lines."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K" + text)
    elif text:
        sys.stderr.write(text + "\n")
    sys.stderr.flush()


def text_of(size):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def digits(value):
    """Three significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def spread(values, show=digits):
    """The median, and the least to the most of the rounds."""
    return f"{show(statistics.median(values))} ({show(min(values))} to {show(max(values))})"


def processor():
    """The cores and the model of this machine."""
    with open("/proc/cpuinfo") as file:
        lines = file.read().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    virtual = any(line.startswith("flags") and " hypervisor" in line for line in lines)
    kind = "virtual machine" if virtual else "machine"
    return f"{len(os.sched_getaffinity(0))} cores of {model} ({kind})"


def parse_names(known):
    """A parser of a list of names, which keeps the order of `known`."""
    def parse(text):
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {name!r}; choose from {', '.join(known)}")
        return [name for name in known if name in names]

    return parse
