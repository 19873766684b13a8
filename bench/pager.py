"""Compares paged programs with the kernel's swap, on this machine, in one run.

  bench/peers pager                            all programs, about six minutes
  bench/peers pager --hogs 1                   beside one CPU-bound process for each core
  bench/peers pager --programs random-read,LU  some programs
  bench/peers pager --systems plain,granary    some systems
  bench/peers pager --json                     every round's numbers, one JSON object a line, instead of tables

The systems, which run each program by turns:

  plain          all memory is local
  zram-lzo-rle   a memory cgroup with a limit, and swap on zram
  zram-lz4       the same with another compressor, where the kernel has it
  file           a memory cgroup with a limit, and swap in a file
  granary        granary run, with a memory node of its own
  granary-sealed the same with --seal, only if --systems names it

Kernel swap needs root. Without root only plain and granary run. The limit of the cgroup is --local and 1 MiB, because
granary does not count page tables and stacks. All swap devices and cgroups are made for the run and removed at its end,
also when it is interrupted. Others on the machine are not touched.

Access patterns touch one word of each page; `modify` loads it and then stores it. The data compresses to a half, except
for LU's numbers and first-touch's pages, which are nearly empty. Times of whole programs are of the computation alone,
but for sort and python3, which count from start to end.

With a tight limit the kernel's reclaim may fail although swap is free. Cgroup v1 then stops the program, and the limit
is raised for a moment, which the output counts. Cgroup v2 kills the program, and its cell shows that. Such cells, and
those of programs beyond --time-limit, do not make the command fail.

Every second round uses the reverse order. A ratio is of two numbers of one round. The tables have the median, minimum
and maximum of the rounds.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

import swap
from report import (ROOT, build, digits, granary_path, parse_names, processor, show_progress,
                    spread)

# In the order in which they run. The first ones touch pages in address order.
PATTERNS = ["sequential-read", "sequential-write", "sequential-modify", "stride-3", "backwards", "first-touch",
            "random-read", "random-modify", "two-threads", "paced-100", "paced-1000", "paced-10000", "paced-100000"]
WHOLE = ["triad", "k-means", "LU", "sort", "python3"]
ZRAM, LZ4 = "zram-lzo-rle", "zram-lz4"
SEALED = "granary-sealed"
USUAL = ["plain", ZRAM, LZ4, "file", "granary"]
SYSTEMS = [*USUAL, SEALED]
# Systems without the kernel's swap.
WITHOUT_SWAP = ("plain", "granary", SEALED)
# Fractions of --memory.
LU_SHARE, SORT_SHARE, PYTHON_SHARE = 8, 8, 48
# Memory of a process that the cgroup counts and granary does not.
ALLOWANCE = 1 << 20
# The least bound of `granary run`.
LOCAL_MIN = 4 << 20
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Failed(Exception):
    """A program gave no result. The text is the reason."""


class TooSlow(Failed):
    """A program did not end within the time limit."""


class Killed(Failed):
    """The kernel killed a program, because its cgroup had no memory left and reclaim found none."""


def parse_size(text):
    """Parses a size such as 256MiB, as `granary` does."""
    number = text.rstrip("bBiI")
    unit = UNITS.get(number[-1:].lower(), 1)
    try:
        size = int(number if unit == 1 else number[:-1]) * unit
    except ValueError:
        size = 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 256MiB")
    return size


# --- processes ----------------------------------------------------------------------------------


@dataclass
class Job:
    """One process: the access patterns together, or one whole program."""

    name: str
    programs: list
    command: list
    # The size of its data; `local` of the whole is in proportion to it.
    size: int
    # The time and the checksum are those of the process and its output.
    is_timed_outside: bool = False

    def parse(self, output, digest, seconds):
        """The records that the process's output contains."""
        if self.is_timed_outside:
            return [{"program": self.name, "seconds": seconds, "checksum": digest[:16]}]
        records = [json.loads(line) for line in output.splitlines()]
        missing = set(self.programs) - {record["program"] for record in records}
        if missing:
            raise Failed(f"no output of {', '.join(sorted(missing))}")
        return records


def run_process(command, time_limit=None, enter=lambda: None):
    """Runs a command. Returns its output's first MiB, its output's digest, its time in s, its peak memory."""
    def prepare():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, swap.SIGNALS)
        enter()

    with tempfile.TemporaryFile() as errors, swap.undisturbed():
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, preexec_fn=prepare,
            start_new_session=True, env={**os.environ, "LC_ALL": "C", "PYTHONHASHSEED": "0"})
        # A thread that is started here takes no signals either.
        late = threading.Timer(time_limit or threading.TIMEOUT_MAX, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        try:
            digest, kept = hashlib.sha256(), b""
            with swap.disturbed():
                while part := process.stdout.read1(1 << 20):
                    digest.update(part)
                    kept += part[:(1 << 20) - len(kept)]
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            seconds = time.monotonic() - began
        finally:
            late.cancel()
            stop(process)
            process.stdout.close()
        if process.returncode != 0:
            if time_limit and seconds >= time_limit:
                raise TooSlow(f"over {time_limit:.0f} s")
            if process.returncode == -signal.SIGKILL:
                raise Killed("killed: out of memory")
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise Failed(f"exit code {process.returncode}: {lines[-1] if lines else 'no message'}")
    return kept.decode(errors="replace"), digest.hexdigest(), seconds, usage.ru_maxrss << 10


def stop(process):
    """Ends a process that still runs, and those that it has started."""
    if process.returncode is not None:
        return
    # `granary run` passes SIGTERM on, and ends its memory node.
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def busy(program, count):
    """Runs CPU-bound processes as long as the context lasts."""
    with swap.reversible() as undo:
        hogs = []
        for _ in range(count):
            hogs.append(subprocess.Popen([program, "spin"], start_new_session=True))
            undo.callback(hogs[-1].wait)
            undo.callback(hogs[-1].kill)
        with swap.disturbed():
            yield
        if any(hog.poll() is not None for hog in hogs):
            raise Failed("a CPU-bound process has ended early")


# --- systems ------------------------------------------------------------------------------------


@dataclass
class Bench:
    """The settings of a run, and what the systems need."""

    memory: int
    local: int
    granary: str
    directory: str
    time_limit: float = None
    kernel: swap.Kernel = field(default_factory=swap.Kernel)
    limit: swap.Limit = None

    def local_of(self, job):
        return max(job.size * self.local // self.memory, LOCAL_MIN)

    def backing(self, job):
        """The size of the swap, and of the memory node: enough for first-touch's pages beside the data."""
        return 4 * max(self.memory, job.size)

    def run(self, system, job):
        """Runs a job on a system. Returns its records."""
        if system == "plain":
            return job.parse(*run_process(job.command, self.time_limit)[:3])
        if system in ("granary", SEALED):
            return self.run_granary(job, ["--seal"] if system == SEALED else [])
        self.limit.set(self.local_of(job) + ALLOWANCE)
        size = self.backing(job)
        if system == "file":
            device = swap.swap_on_file(self.kernel, os.path.join(self.directory, "swap"), size)
        else:
            device = swap.swap_on_zram(self.kernel, system.removeprefix("zram-"), size)
        with device:
            try:
                with self.limit.rescued() as rescues:
                    records = job.parse(*run_process(job.command, self.time_limit, self.limit.enter)[:3])
            finally:
                self.limit.empty()
        return [{**record, "rescues": len(rescues)} for record in records]

    def run_granary(self, job, options):
        counters = os.path.join(self.directory, "stats.json")
        command = [self.granary, "run", "--local", str(self.local_of(job)), "--memory",
                   str(self.backing(job)), "--stats-json", counters, *options, "--", *job.command]
        records = job.parse(*run_process(command, self.time_limit)[:3])
        with open(counters) as file:
            records.append({"program": job.name, "stats": json.load(file)})
        return records


def jobs_of(bench, programs, accesses, program):
    """The processes that run `programs`. `program` is the path of the compiled bench/pager.c."""
    jobs = []
    patterns = [name for name in programs if name in PATTERNS]
    if patterns:
        # `content` compares the whole memory at the end.
        command = [program, "--memory", str(bench.memory), "--accesses", str(accesses), *patterns, "content"]
        jobs.append(Job("patterns", patterns, command, bench.memory))
    for name, share in (("triad", 1), ("k-means", 1), ("LU", LU_SHARE)):
        if name in programs:
            size = bench.memory // share
            jobs.append(Job(name, [name], [program, "--memory", str(size), name], size))
    script = os.path.join(ROOT, "crates", "cli", "src", "commands", "quickstart.py")
    for name, share, command in (
        ("sort", SORT_SHARE, ["sort", "--buffer-size=2G", "--parallel=2"]),
        ("python3", PYTHON_SHARE, ["python3", script]),
    ):
        if name in programs:
            text = os.path.join(bench.directory, f"{name}.text")
            with open(text, "wb") as file:
                subprocess.run([program, "text", str(bench.memory // share)], stdout=file, check=True)
            command = [*command, text]
            # This run also brings the program's files into the page cache, outside of the cgroup.
            *_, peak = run_process(command)
            jobs.append(Job(name, [name], command, peak, is_timed_outside=True))
    return jobs


def measure(bench, jobs, systems, rounds, progress=show_progress):
    """Runs all jobs on all systems `rounds` times. Returns the records and the reasons for missing ones."""
    records, failed = [], {}
    for turn in range(rounds):
        for job in jobs:
            for system in reversed(systems) if turn % 2 else systems:
                # A program that was killed may end in another round.
                if not isinstance(failed.get((system, job.name)), (type(None), Killed)):
                    continue
                progress(f"round {turn + 1} of {rounds}: {job.name}, {system}")
                try:
                    got = bench.run(system, job)
                except (Failed, swap.Unavailable, OSError, ValueError, KeyError) as why:
                    failed[system, job.name] = why
                    continue
                records += [{"system": system, "job": job.name, "round": turn, **record} for record in got]
    progress("")
    return records, failed


def differences(records):
    """Programs whose checksum is not the same in all systems and rounds, one line each."""
    sums = {}
    for record in records:
        if "checksum" in record:
            sums.setdefault(record["program"], {}).setdefault(record["checksum"], set()).add(record["system"])
    return [f"{program}: " + "; ".join(f"{checksum} in {', '.join(sorted(systems))}"
                                       for checksum, systems in sorted(found.items()))
            for program, found in sums.items() if len(found) > 1]


# --- tables -------------------------------------------------------------------------------------


class Numbers:
    """Records by program, system and round."""

    def __init__(self, records):
        self.rows = {}
        for record in records:
            self.rows.setdefault((record["program"], record["system"]), {})[record["round"]] = record

    def of(self, program, system, name):
        """The numbers of the rounds, by round."""
        rows = self.rows.get((program, system), {})
        return {turn: row[name] for turn, row in rows.items() if name in row}

    def ratios(self, program, one, other, name):
        a, b = self.of(program, one, name), self.of(program, other, name)
        return [a[turn] / b[turn] for turn in sorted(set(a) & set(b)) if b[turn]]

    def losses(self, program, one, other, name):
        """The time that `one` takes beyond plain, over the time that `other` takes beyond plain."""
        a, b, plain = (self.of(program, system, name) for system in (one, other, "plain"))
        turns = sorted(set(a) & set(b) & set(plain))
        return [(a[turn] - plain[turn]) / (b[turn] - plain[turn]) for turn in turns if b[turn] > plain[turn]]


def cell(values, otherwise=""):
    return spread(values) if values else otherwise


def table(numbers, title, programs, systems, name, failed):
    """A table in Markdown: a number of each system, the ratios to plain, and granary's to zram."""
    programs = [program for program in programs
                if any(numbers.of(program, system, name) for system in systems)]
    if not programs:
        return []
    paged = [system for system in (ZRAM, "granary", SEALED) if system in systems and "plain" in systems]
    zram = next((system for system in (ZRAM, LZ4) if system in systems), None)
    beside = zram and "granary" in systems
    pairs = [pair for pair in ((SEALED, "granary"), (SEALED, zram)) if all(system in systems for system in pair)]
    heads = ["", *systems, *(f"{system} over plain" for system in paged)]
    heads += [f"{one} over {other}" for one, other in pairs]
    if beside:
        heads.append(f"granary over {zram}")
        if "plain" in systems and name == "seconds":
            heads.append(f"granary's loss over {zram}'s")
    lines = [f"**{title}.** Median of the rounds (least to most).", "",
             "| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for program in programs:
        cells = [program]
        for system in systems:
            why = failed.get((system, program if program in WHOLE else "patterns"), "")
            cells.append(cell(list(numbers.of(program, system, name).values()), str(why)))
        cells += [cell(numbers.ratios(program, system, "plain", name)) for system in paged]
        cells += [cell(numbers.ratios(program, one, other, name)) for one, other in pairs]
        if beside:
            cells.append(cell(numbers.ratios(program, "granary", zram, name)))
            if "plain" in systems and name == "seconds":
                cells.append(cell(numbers.losses(program, "granary", zram, name)))
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


# The counters of `granary run --stats-json` that say where the time of a fault is spent.
COUNTERS = [
    ("faults", lambda s: s["faults"]),
    ("mean, us", lambda s: s["fault_mean_us"]),
    ("P99, us", lambda s: s["fault_p99_us"]),
    ("reading, us", lambda s: s["fault_read_us"]),
    ("mapping, us", lambda s: s["fault_map_us"]),
    ("evicting, us", lambda s: s["fault_evict_us"]),
    ("write-protected, %", lambda s: 100 * s["faults_write_protected"] / s["faults"]),
    ("evicting, %", lambda s: 100 * s["faults_evicting"] / s["faults"]),
    ("waiting for a WRITE, %", lambda s: 100 * s["faults_writing"] / s["faults"]),
    ("pages evicted in faults", lambda s: s["pages_evicted_in_faults"]),
    ("sleeps of the NIC thread", lambda s: s["nic_sleeps"]),
]


def counter_table(records):
    """A table of granary's counters, for each process."""
    stats = {}
    for record in records:
        if record.get("stats", {}).get("faults"):
            program = record["program"] + (", sealed" if record.get("system") == SEALED else "")
            stats.setdefault(program, []).append(record["stats"])
    if not stats:
        return []
    lines = ["**Faults of granary.** Median of the rounds (least to most).", "",
             "| | " + " | ".join(name for name, _ in COUNTERS) + " |", "| --- " * (len(COUNTERS) + 1) + "|"]
    for program, rounds in stats.items():
        cells = [cell([of(one) for one in rounds]) for _, of in COUNTERS]
        lines.append("| " + " | ".join([program, *cells]) + " |")
    return [*lines, ""]


def rescue_lines(records):
    """Names the runs in which the kernel's reclaim failed, so that they had a little more memory for a moment."""
    found = {}
    for record in records:
        if record.get("rescues"):
            rounds = found.setdefault((record["system"], record["job"]), {})
            rounds[record["round"]] = record["rescues"]
    if not found:
        return []
    cases = [f"{job} on {system} ({cell(list(rounds.values()))} times)" for (system, job), rounds in found.items()]
    return [f"Reclaim failed, and the limit was raised by {swap.RESCUE >> 10} KiB at a time for a moment: "
            f"{'; '.join(cases)}.", ""]


def tables(records, systems, failed={}):
    numbers = Numbers(record for record in records if "stats" not in record)
    lines = []
    for title, programs, name in (
        ("Access patterns, time of an access, us", PATTERNS, "us"),
        ("Single accesses, p50, us", PATTERNS, "p50_us"),
        ("Single accesses, p99, us", PATTERNS, "p99_us"),
        ("Whole programs, s", WHOLE, "seconds"),
    ):
        lines += table(numbers, title, programs, systems, name, failed)
    return "\n".join(lines + rescue_lines(records) + counter_table(records))


def cpu_seconds():
    """The CPU time of this machine that is not idle, and that of the ended processes of this run."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, steal = (int(word) for word in file.readline().split()[1:9])
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq + steal) / ticks, own.ru_utime + own.ru_stime


def describe(bench, args, hogs):
    """The machine and the settings."""
    def setting(path):
        try:
            return bench.kernel.read(path).strip()
        except swap.Unavailable:
            return "?"

    huge = setting("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0]
    cgroup = f"cgroup v{bench.limit.version}, " if bench.limit else ""
    return (f"{processor()}, Linux {platform.release()}; {bench.memory >> 20} MiB of data, of which "
            f"{bench.local >> 20} MiB local; {args.rounds} rounds of {args.accesses} accesses; {hogs} CPU-bound "
            f"processes beside; {cgroup}page-cluster {setting('/proc/sys/vm/page-cluster')}, swappiness "
            f"{setting('/proc/sys/vm/swappiness')}, transparent huge pages {huge or '?'}; load of the last "
            f"minute at the start {os.getloadavg()[0]:.1f}.")


# --- the run ------------------------------------------------------------------------------------


def interrupt(number, _frame):
    raise SystemExit(128 + number)


def set_up_limit(bench, undo):
    """Makes the cgroup. Returns the reason if this machine cannot limit the memory of processes."""
    if os.geteuid() != 0:
        return "kernel swap needs root: only plain and granary run"
    try:
        with swap.undisturbed():
            bench.limit = swap.Limit(bench.kernel, undo)
    except swap.Unavailable as why:
        return f"no kernel swap ({why}): only plain and granary run"
    return None


def parse_arguments(words):
    about, rest = __doc__.split("\n\n", 1)
    options = argparse.ArgumentParser(
        prog="bench/peers pager", description=about, epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = PATTERNS + WHOLE
    options.add_argument("--hogs", type=int, default=0, metavar="N",
                         help="CPU-bound processes for each core; default 0")
    options.add_argument("--rounds", type=int, default=3, metavar="N", help="default 3")
    options.add_argument("--memory", type=parse_size, default="256MiB", metavar="SIZE",
                         help="data of a program; LU, sort and python3 have less; default 256MiB")
    options.add_argument("--local", type=parse_size, metavar="SIZE",
                         help="local part of it, in proportion for smaller programs; default a quarter")
    options.add_argument("--accesses", type=int, metavar="N",
                         help="of a pattern, in address order 8 times as many; default 8192, with --hogs 1024")
    options.add_argument("--programs", type=parse_names(everything), default=everything, metavar="LIST",
                         help=f"from {', '.join(everything)}")
    options.add_argument("--systems", type=parse_names(SYSTEMS), default=USUAL, metavar="LIST",
                         help=f"from {', '.join(SYSTEMS)}")
    options.add_argument("--time-limit", type=float, default=60, metavar="S",
                         help="longest time of one process, in seconds; default 60")
    options.add_argument("--json", nargs="?", const="-", metavar="FILE",
                         help="write every round's numbers to FILE, or instead of the tables")
    options.add_argument("--no-build", action="store_true", help="use the existing release build of granary")
    options.add_argument("--granary", metavar="FILE", help="use this build of the command")
    args = options.parse_args(words)
    if args.local is None:
        args.local = args.memory // 4
    if args.accesses is None:
        args.accesses = 1024 if args.hogs else 8192
    if args.rounds < 1 or args.hogs < 0 or args.accesses < 2 or not LOCAL_MIN <= args.local <= args.memory:
        options.error("--rounds must be at least 1, --hogs at least 0, --accesses at least 2, and --local between "
                      "4MiB and --memory")
    return args


def main(words):
    args = parse_arguments(words)
    for number in swap.SIGNALS:
        signal.signal(number, interrupt)
    if args.granary is None and {"granary", SEALED} & set(args.systems):
        if not args.no_build:
            build("granary-cli", "granary-preload")
        args.granary = granary_path()
    with swap.reversible() as undo, swap.disturbed():
        directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="granary-peers-"))
        program = os.path.join(directory, "pager")
        source = os.path.join(ROOT, "bench", "pager.c")
        if subprocess.run(["cc", "-O3", "-pthread", "-o", program, source, "-lm"]).returncode != 0:
            sys.exit("bench/peers: bench/pager.c does not compile; see the compiler's message above")
        bench = Bench(args.memory, args.local, args.granary, directory, args.time_limit)
        systems = args.systems
        if any(system not in WITHOUT_SWAP for system in systems):
            if why := set_up_limit(bench, undo):
                print(f"bench/peers: {why}", file=sys.stderr)
                systems = [system for system in systems if system in WITHOUT_SWAP]
        hogs = args.hogs * len(os.sched_getaffinity(0))
        about = describe(bench, args, hogs)
        jobs = jobs_of(bench, args.programs, args.accesses, program)
        before, began = cpu_seconds(), time.monotonic()
        with busy(program, hogs):
            records, failed = measure(bench, jobs, systems, args.rounds)
        busy_s, own_s = (after - earlier for after, earlier in zip(cpu_seconds(), before))
        others = (busy_s - own_s) / (time.monotonic() - began) / os.cpu_count()
        about += f" During the run other work of the machine took {others:.0%} of its cores."
    if args.json:
        with contextlib.ExitStack() as files:
            out = sys.stdout if args.json == "-" else files.enter_context(open(args.json, "w"))
            for record in records:
                print(json.dumps(record), file=out)
    if args.json != "-":
        print(about + "\n\n" + tables(records, systems, failed))
    for (system, job), why in failed.items():
        print(f"bench/peers: {job} on {system}: {why or repr(why)}", file=sys.stderr)
    for line in differences(records):
        print(f"bench/peers: the checksums differ: {line}", file=sys.stderr)
    # Such results of a system are no failures of the run.
    has_failed = any(not isinstance(why, (swap.Unavailable, TooSlow, Killed)) for why in failed.values())
    return 1 if has_failed or differences(records) else 0
