"""Compares servers of key-value stores under one client, on this machine, in one run.

  bench/kv                              all systems and 1,000,000 keys, about half an hour
  bench/kv --keys 100000 --rounds 3     fewer keys, some minutes
  bench/kv --systems redis,granary      some systems
  bench/kv --json                       every round's numbers, one JSON object a line, instead of tables

The systems, which run by turns, each started anew in each round:

  redis          redis-server --save "" --appendonly no
  memcached      memcached -t 1
  valkey         valkey-server, as redis; only if it is installed or --valkey names it
  granary        granary kv, with its memory node in the process
  granary-remote-index    the same, --no-index-cache
  granary-shm    granary kv over granary serve, shared memory
  granary-shm-remote-index    the same, --no-index-cache
  granary-roce   granary kv over granary serve, RoCEv2 on the loopback interface

The client is `granary bench kv`, with the same connections and pipelines for all. In each round a system is filled
with all keys, then reads and overwrites keys drawn at random with each pipeline, then deletes 90 % of the keys.

CPU is the time of all threads of the server's process during a workload, over its operations. The memory node of shm
and roce is a process of its own, whose time is in a column of its own: its NIC thread stands in for hardware.
Memory is used_memory_rss of INFO: of granary that is the chunks held in the pool; of the others it is the memory of the
process, as memcached's is. Given back is the share of it that is gone within --settle seconds after the deletions.
granary moves blocks together once 1 MiB of its chunks is unused (active-defrag-ignore-bytes, 100 MiB by default), so
that a run with few keys shows it too.

Every second round uses the reverse order. A ratio is of two numbers of one round. The tables have the median, minimum
and maximum of the rounds.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

# Imports leave no __pycache__ in the repository.
sys.dont_write_bytecode = True
from report import build, granary_path, parse_names, processor, show_progress, spread

RESP, MEMCACHED = "resp", "memcached"
REDIS = "redis"
GRANARY = ["granary", "granary-remote-index", "granary-shm", "granary-shm-remote-index", "granary-roce"]
SYSTEMS = [REDIS, "memcached", "valkey", *GRANARY]
KEY_BYTES = 16
# Seconds until a server must answer, and until it must have ended.
START_LIMIT, END_LIMIT = 30, 10
# Pipeline of the fill and of the deletions, whose times are no result.
LOAD_PIPELINE = 16
TICKS = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A system gave no result. The text is the reason."""


# --- processes ----------------------------------------------------------------------------------


def free_port():
    """A port of the loopback interface that no program listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cpu_seconds(process):
    """The CPU time of a process and its threads."""
    with open(f"/proc/{process.pid}/stat") as file:
        # The name may have spaces; the fields behind it do not.
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_bytes(process):
    with open(f"/proc/{process.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def info(port):
    """The fields of a server's INFO memory."""
    with socket.create_connection(("127.0.0.1", port), START_LIMIT) as stream:
        stream.sendall(b"INFO memory\r\n")
        reply = stream.makefile("rb")
        head = reply.readline()
        if not head.startswith((b"$", b"=")):
            raise Failed(f"INFO: {head.decode(errors='replace').strip()}")
        text = reply.read(int(head[1:])).decode()
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


@dataclass
class Running:
    """A server that runs: its processes, and how it is reached."""

    server: subprocess.Popen
    port: int
    protocol: str
    node: subprocess.Popen = None

    def held_bytes(self):
        """The memory that the server holds for its data."""
        if self.protocol == MEMCACHED:
            return resident_bytes(self.server)
        return int(info(self.port)["used_memory_rss"])

    def used_bytes(self):
        if self.protocol == MEMCACHED:
            return resident_bytes(self.server)
        return int(info(self.port)["used_memory"])

    def cpu(self):
        return cpu_seconds(self.server), cpu_seconds(self.node) if self.node else 0.0


def stop(process):
    """Ends a process."""
    process.terminate()
    try:
        process.wait(END_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def launch(command, undo, **options):
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    except FileNotFoundError:
        raise Failed(f"{command[0]} is not installed")
    undo.callback(stop, process)
    return process


def wait_for(process, port):
    """Waits until a server accepts connections."""
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Failed(f"ended with exit code {process.returncode} at its start")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.01)
    raise Failed(f"no connection within {START_LIMIT} s")


# --- systems ------------------------------------------------------------------------------------


@dataclass
class Bench:
    """The settings of a run."""

    granary: str
    keys: int
    value_bytes: int
    connections: int
    operations: int
    pipelines: list
    settle: float
    valkey: str = "valkey-server"
    # Replaced by tests.
    drive: object = field(default=None)

    def payload(self):
        return self.keys * (KEY_BYTES + self.value_bytes)

    def donation(self):
        """The memory of a memory node, in MiB: room for updates out of place, index and slack."""
        return (2 * self.keys * (self.value_bytes + 160) >> 20) + 128

    def start(self, system, undo, directory):
        """Starts a system. Returns how it runs."""
        port = free_port()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if system in (REDIS, "valkey"):
            program = "redis-server" if system == REDIS else self.valkey
            command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                       "--dir", directory]
            server = launch(command, undo, **quiet)
            wait_for(server, port)
            return Running(server, port, RESP)
        if system == "memcached":
            memory = self.donation()
            command = ["memcached", "-t", "1", "-l", "127.0.0.1", "-p", str(port), "-U", "0", "-m", str(memory)]
            if os.geteuid() == 0:
                command += ["-u", "nobody"]
            server = launch(command, undo, **quiet)
            wait_for(server, port)
            return Running(server, port, MEMCACHED)
        words = system.split("-")
        command = [self.granary, "kv", "--port", str(port), "--bind", "127.0.0.1", "--dir", directory,
                   "--set", "active-defrag-ignore-bytes 1mb"]
        if "remote" in words:
            command.append("--no-index-cache")
        node = None
        if "shm" in words or "roce" in words:
            node, address = self.start_node(undo, directory, "roce" in words)
            command += address
        else:
            command += ["--memory", f"{self.donation()}MiB"]
        server = launch(command, undo, **quiet)
        wait_for(server, port)
        return Running(server, port, RESP, node)

    def start_node(self, undo, directory, is_remote):
        """Starts a memory node. Returns its process, and the options of a client."""
        command = [self.granary, "serve", "--json", "--memory", f"{self.donation()}MiB", "--chunk", "64KiB",
                   "--socket", os.path.join(directory, "node.sock")]
        token = os.path.join(directory, "token")
        if is_remote:
            with open(os.open(token, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
                file.write(os.urandom(16).hex() + "\n")
            command += ["--listen", "127.0.0.1:0", "--token-file", token]
        node = launch(command, undo, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        line = node.stdout.readline()
        if not line:
            raise Failed("granary serve has ended at its start")
        ready = json.loads(line)
        if is_remote:
            return node, ["--pool", ready["remote"], "--token-file", token]
        return node, ["--pool", ready["pool"]]

    def client(self, running, workload, pipeline, operations, loaded):
        """Runs the client once. Returns its records by metric and statistic."""
        command = [self.granary, "bench", "kv", f"--{running.protocol}", f"127.0.0.1:{running.port}", "--json",
                   "--rounds", "1", "--workloads", workload, "--keys", str(self.keys), "--operations", str(operations),
                   "--sizes", str(self.value_bytes), "--connections", str(self.connections),
                   "--pipeline", str(pipeline)]
        done = subprocess.run(command + (["--loaded"] if loaded else []), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            raise Failed(lines[-1] if lines else f"the client has exit code {done.returncode}")
        records = [json.loads(line) for line in done.stdout.splitlines()]
        return {(record["metric"], record["statistic"]): record["value"] for record in records}

    def workload(self, running, workload, pipeline, operations, loaded=True):
        """Measures a workload. Returns one record."""
        before = running.cpu()
        values = (self.drive or self.client)(running, workload, pipeline, operations, loaded)
        server, node = (after - earlier for after, earlier in zip(running.cpu(), before))
        return {
            "workload": workload, "pipeline": pipeline, "rate": values["rate_per_s", "mean"],
            "p50": values["latency_us", "p50"], "p99": values["latency_us", "p99"],
            "p999": values["latency_us", "p999"], "misses": values.get(("miss_ratio", "mean"), 0.0),
            "cpu": server / operations * 1e6, "node_cpu": node / operations * 1e6,
        }

    def run(self, system, directory):
        """Runs a system once. Returns its records."""
        with contextlib.ExitStack() as undo:
            running = self.start(system, undo, directory)
            empty = running.held_bytes()
            records = [self.workload(running, "fillsync", LOAD_PIPELINE, self.keys, loaded=False)]
            full, used = running.held_bytes(), running.used_bytes()
            for pipeline in self.pipelines:
                # A pipeline is faster, so that it needs more operations for the same time.
                operations = self.operations * min(pipeline, 4)
                for workload in ("readrandom", "overwrite"):
                    records.append(self.workload(running, workload, pipeline, operations))
            before = running.held_bytes()
            self.workload(running, "deleterandom", LOAD_PIPELINE, self.keys)
            after = self.settled(running)
            payload = self.payload()
            records.append({"workload": "memory", "held_over_payload": full / payload,
                            "used_over_payload": used / payload,
                            "returned": (before - after) / max(before - empty, 1),
                            "local": resident_bytes(running.server) if running.node else 0})
            return records

    def settled(self, running):
        """The least memory held within the time to settle."""
        deadline, least = time.monotonic() + self.settle, running.held_bytes()
        while time.monotonic() < deadline:
            time.sleep(min(0.5, self.settle))
            least = min(least, running.held_bytes())
        return least


def measure(bench, systems, rounds, progress=show_progress):
    """Runs all systems `rounds` times. Returns the records and the reasons for missing ones."""
    records, failed = [], {}
    for turn in range(rounds):
        for system in reversed(systems) if turn % 2 else systems:
            if system in failed:
                continue
            progress(f"round {turn + 1} of {rounds}: {system}")
            with tempfile.TemporaryDirectory(prefix="granary-kv-") as directory:
                try:
                    got = bench.run(system, directory)
                except (Failed, OSError, ValueError, KeyError) as why:
                    failed[system] = why
                    continue
            records += [{"system": system, "round": turn, **record} for record in got]
    progress("")
    return records, failed


# --- tables -------------------------------------------------------------------------------------


class Numbers:
    """Records by system, workload and pipeline."""

    def __init__(self, records):
        self.rows = {}
        for record in records:
            key = record["system"], record["workload"], record.get("pipeline")
            self.rows.setdefault(key, {})[record["round"]] = record

    def of(self, system, workload, pipeline, name):
        """The numbers of the rounds, by round."""
        rows = self.rows.get((system, workload, pipeline), {})
        return {turn: row[name] for turn, row in rows.items() if name in row}

    def ratios(self, system, other, workload, pipeline, name):
        a, b = (self.of(one, workload, pipeline, name) for one in (system, other))
        return [a[turn] / b[turn] for turn in sorted(set(a) & set(b)) if b[turn]]


def cell(values):
    return spread(list(values)) if values else ""


def rows(heads, lines):
    return ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|",
            *("| " + " | ".join(line) + " |" for line in lines), ""]


WORKLOADS = {"readrandom": "GET", "overwrite": "SET", "fillsync": "SET of new keys"}


def tables(records, systems):
    """The tables in Markdown."""
    numbers, lines = Numbers(records), []
    pairs = sorted({(record["workload"], record["pipeline"]) for record in records if record.get("pipeline")},
                   key=lambda pair: (list(WORKLOADS).index(pair[0]), pair[1]))
    others = [other for other in (REDIS, "memcached", "valkey") if other in systems]
    for workload, pipeline in pairs:
        lines += [f"**{WORKLOADS[workload]}, pipeline of {pipeline}.** Median of the rounds (least to most).", ""]
        table = []
        for system in systems:
            of = lambda name: cell(numbers.of(system, workload, pipeline, name).values())
            if not of("rate"):
                continue
            node = numbers.of(system, workload, pipeline, "node_cpu")
            table.append([system, of("rate"), of("p50"), of("p99"), of("p999"), of("cpu"),
                          cell(node.values()) if any(node.values()) else "",
                          *(cell(numbers.ratios(system, other, workload, pipeline, "rate")) for other in others),
                          *([cell(numbers.ratios(system, REDIS, workload, pipeline, "cpu"))]
                            if REDIS in systems else [])])
        heads = ["", "operations/s", "P50, us", "P99, us", "P99.9, us", "CPU, us/operation", "memory node's CPU, us",
                 *(f"rate over {other}" for other in others), *(["CPU over redis"] if REDIS in systems else [])]
        lines += rows(heads, table)
    lines += ["**Memory.** After the fill, and after 90 % of the keys were deleted.", ""]
    table = []
    for system in systems:
        of = lambda name: cell(numbers.of(system, "memory", None, name).values())
        if of("returned"):
            table.append([system, of("held_over_payload"), of("used_over_payload"), of("returned")])
    lines += rows(["", "held over payload", "used over payload", "given back"], table)
    return "\n".join(lines)


def misses(records):
    """Workloads in which keys were missing, one line each."""
    return [f"{r['workload']} on {r['system']}: {r['misses']:.2%} of the keys are missing"
            for r in records if r.get("misses", 0) > 0]


# --- command line -------------------------------------------------------------------------------


parse_systems = parse_names(SYSTEMS)


def parse_numbers(text):
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers from 1 on, separated by commas")
    return numbers


def parse_arguments(words):
    about, rest = __doc__.split("\n\n", 1)
    options = argparse.ArgumentParser(prog="bench/kv", description=about, epilog=rest,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--systems", type=parse_systems, metavar="LIST", help=f"from {', '.join(SYSTEMS)}")
    options.add_argument("--rounds", type=int, default=3, metavar="N", help="default 3")
    options.add_argument("--keys", type=int, default=1_000_000, metavar="N", help="default 1,000,000")
    options.add_argument("--operations", type=int, metavar="N",
                         help="of a workload at pipeline 1, up to 4 times as many at others; default: a tenth of the "
                              "keys, at least 10,000")
    options.add_argument("--size", type=int, default=1024, metavar="BYTES", help="of a value; default 1024")
    options.add_argument("--connections", type=int, default=50, metavar="N", help="default 50")
    options.add_argument("--pipelines", type=parse_numbers, default=[1, 16], metavar="LIST", help="default 1,16")
    options.add_argument("--settle", type=float, default=10, metavar="S",
                         help="seconds after the deletions in which memory is given back; default 10")
    options.add_argument("--valkey", metavar="FILE", help="the program of valkey; default valkey-server")
    options.add_argument("--json", nargs="?", const="-", metavar="FILE",
                         help="write every round's numbers to FILE, or instead of the tables")
    options.add_argument("--no-build", action="store_true", help="use the existing release build of granary")
    options.add_argument("--granary", metavar="FILE", help="use this build of the command")
    args = options.parse_args(words)
    if args.operations is None:
        args.operations = max(args.keys // 10, 10_000)
    if min(args.rounds, args.keys, args.operations, args.size, args.connections) < 1 or args.settle < 0:
        options.error("--rounds, --keys, --operations, --size and --connections must be at least 1, --settle at "
                      "least 0")
    if args.systems is None:
        has_valkey = args.valkey or shutil.which("valkey-server")
        args.systems = [system for system in SYSTEMS if system != "valkey" or has_valkey]
    return args


def describe(bench, args):
    load = os.getloadavg()[0]
    return (f"{time.strftime('%Y-%m-%d')}, {processor()}, Linux {platform.release()}. {bench.keys:,} keys with values "
            f"of {bench.value_bytes} bytes, {bench.connections} connections, {args.rounds} rounds. Load average before "
            f"the run: {load:.1f}.")


def interrupt(number, _):
    sys.exit(128 + number)


def main(words):
    args = parse_arguments(words)
    signal.signal(signal.SIGTERM, interrupt)
    if args.granary is None:
        if not args.no_build:
            build("granary-cli")
        args.granary = granary_path()
    bench = Bench(args.granary, args.keys, args.size, args.connections, args.operations, args.pipelines, args.settle,
                  args.valkey or "valkey-server")
    about = describe(bench, args)
    records, failed = measure(bench, args.systems, args.rounds)
    if args.json:
        with contextlib.ExitStack() as files:
            out = sys.stdout if args.json == "-" else files.enter_context(open(args.json, "w"))
            for record in records:
                print(json.dumps(record), file=out)
    if args.json != "-":
        print(about + "\n\n" + tables(records, args.systems))
    for system, why in failed.items():
        print(f"bench/kv: {system}: {why or repr(why)}", file=sys.stderr)
    for line in misses(records):
        print(f"bench/kv: {line}", file=sys.stderr)
    return 1 if failed or misses(records) else 0
