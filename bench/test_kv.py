"""Tests of `bench/kv`: command line, tables, and processes. No test starts a server of another project."""

import argparse
import contextlib
import io
import os
import socket
import sys
import tempfile
import threading
import unittest

sys.dont_write_bytecode = True
import kv


def bench(**options):
    settings = {"granary": "granary", "keys": 1000, "value_bytes": 100, "connections": 5, "operations": 500,
                "pipelines": [1, 16], "settle": 0}
    return kv.Bench(**{**settings, **options})


class FakeRunning:
    """A server whose CPU time and memory are those of lists."""

    node = None

    def __init__(self, held):
        self.held, self.seconds = list(held), 0

    def held_bytes(self):
        return self.held.pop(0) if len(self.held) > 1 else self.held[0]

    def used_bytes(self):
        return 50_000

    def cpu(self):
        self.seconds += 0.01
        return self.seconds, 0.0


def values(*_):
    return {("rate_per_s", "mean"): 1e5, ("latency_us", "p50"): 10, ("latency_us", "p99"): 20,
            ("latency_us", "p999"): 30}


class TestRun(unittest.TestCase):
    def test_workloads_run_in_order_and_memory_is_noted(self):
        calls = []

        def drive(running, workload, pipeline, operations, loaded):
            calls.append((workload, pipeline, operations, loaded))
            return values()

        running = FakeRunning([1_000, 201_000, 201_000, 21_000])
        running.server = None
        one = bench(drive=drive)
        one.start = lambda *_: running
        records = one.run("redis", "")
        self.assertEqual(calls, [
            ("fillsync", 16, 1000, False), ("readrandom", 1, 500, True), ("overwrite", 1, 500, True),
            ("readrandom", 16, 2000, True), ("overwrite", 16, 2000, True), ("deleterandom", 16, 1000, True)])
        self.assertEqual(records[-1]["returned"], 0.9)
        self.assertEqual(records[-1]["held_over_payload"], 201_000 / 116_000)
        self.assertAlmostEqual(records[1]["cpu"], 0.01 / 500 * 1e6)

    def test_a_failed_system_does_not_stop_the_others(self):
        one = bench()

        def run(system, _):
            if system == "redis":
                raise kv.Failed("not installed")
            return [{"workload": "readrandom", "pipeline": 1, "rate": 1}]

        one.run = run
        records, failed = kv.measure(one, ["redis", "granary"], 3, progress=lambda _: None)
        self.assertEqual([record["system"] for record in records], ["granary"] * 3)
        self.assertEqual(str(failed["redis"]), "not installed")

    def test_every_second_round_has_the_reverse_order(self):
        one, order = bench(), []
        one.run = lambda system, _: order.append(system) or []
        kv.measure(one, ["a", "b"], 2, progress=lambda _: None)
        self.assertEqual(order, ["a", "b", "b", "a"])


class TestProcesses(unittest.TestCase):
    def test_a_program_that_is_missing_or_ends_is_a_reason(self):
        with contextlib.ExitStack() as undo:
            with self.assertRaisesRegex(kv.Failed, "is not installed"):
                kv.launch(["/nonexistent/server"], undo)
            process = kv.launch(["sh", "-c", "exit 3"], undo)
            with self.assertRaisesRegex(kv.Failed, "exit code 3"):
                kv.wait_for(process, kv.free_port())

    def test_processes_end_with_the_run(self):
        with contextlib.ExitStack() as undo:
            process = kv.launch(["sleep", "1000"], undo)
            self.assertGreaterEqual(kv.cpu_seconds(process), 0)
            self.assertGreater(kv.resident_bytes(process), 0)
        self.assertIsNotNone(process.returncode)

    def test_the_fields_of_info_are_read(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            text = b"# Memory\r\nused_memory:7\r\nused_memory_rss:9\r\n"

            def serve():
                for reply in (b"$%d\r\n%s\r\n" % (len(text), text), b"-NOAUTH\r\n"):
                    stream, _ = listener.accept()
                    with stream:
                        stream.recv(100)
                        stream.sendall(reply)

            thread = threading.Thread(target=serve)
            thread.start()
            port = listener.getsockname()[1]
            self.assertEqual(kv.info(port), {"used_memory": "7", "used_memory_rss": "9"})
            with self.assertRaisesRegex(kv.Failed, "NOAUTH"):
                kv.info(port)
            thread.join()

    def test_a_clients_last_line_is_the_reason(self):
        running = kv.Running(None, 1, kv.RESP)
        with self.assertRaisesRegex(kv.Failed, "exit code 1"):
            bench(granary="false").client(running, "readrandom", 1, 10, True)
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "client")
            with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o700), "w") as file:
                file.write("#!/bin/sh\necho first >&2; echo the server refuses >&2; exit 2\n")
            with self.assertRaisesRegex(kv.Failed, "^the server refuses$"):
                bench(granary=path).client(running, "readrandom", 1, 10, True)


class TestTables(unittest.TestCase):
    RECORDS = [
        {"system": system, "workload": "readrandom", "pipeline": 1, "round": turn, "rate": rate, "p50": 1, "p99": 2,
         "p999": 3, "cpu": 5, "node_cpu": 0, "misses": 0}
        for turn, row in enumerate([(100, 120), (200, 180), (300, 450)])
        for system, rate in zip(("redis", "granary"), row)
    ]

    def test_ratios_are_of_one_round(self):
        numbers = kv.Numbers(self.RECORDS[:-1])
        self.assertEqual(numbers.ratios("granary", "redis", "readrandom", 1, "rate"), [1.2, 0.9])

    def test_a_row_has_medians_and_extremes(self):
        memory = [{"system": "granary", "workload": "memory", "round": 0, "held_over_payload": 1.1,
                   "used_over_payload": 1.05, "returned": 0.95, "local": 0}]
        text = kv.tables(self.RECORDS + memory, ["redis", "granary"])
        self.assertIn("**GET, pipeline of 1.**", text)
        self.assertIn("| granary | 180 (120 to 450) |", text)
        self.assertIn("| 1.2 (0.9 to 1.5) | 1 (1 to 1) |", text)
        self.assertIn("| granary | 1.1 (1.1 to 1.1) | 1.05 (1.05 to 1.05) | 0.95 (0.95 to 0.95) |", text)
        self.assertNotIn("memcached", text)

    def test_missing_keys_are_told(self):
        records = [{**self.RECORDS[0], "misses": 0.25}]
        self.assertEqual(kv.misses(records), ["readrandom on redis: 25.00% of the keys are missing"])
        self.assertEqual(kv.misses(self.RECORDS), [])


class TestArguments(unittest.TestCase):
    def test_systems_keep_their_order(self):
        self.assertEqual(kv.parse_systems("granary,redis"), ["redis", "granary"])
        with self.assertRaisesRegex(argparse.ArgumentTypeError, "choose from"):
            kv.parse_systems("oracle")

    def test_defaults_follow_the_number_of_keys(self):
        self.assertEqual(kv.parse_arguments([]).operations, 100_000)
        self.assertEqual(kv.parse_arguments(["--keys", "5000"]).operations, 10_000)

    def test_impossible_arguments_are_refused(self):
        for words in (["--rounds", "0"], ["--pipelines", "x"], ["--pipelines", "0"], ["--systems", "x"]):
            with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
                kv.parse_arguments(words)


if __name__ == "__main__":
    unittest.main()
