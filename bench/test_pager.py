"""Tests of `bench/peers pager`: command line, tables, and the set-up and removal of kernel swap.

The kernel is a directory with copies of its files: no test needs root or changes the machine.
"""

import argparse
import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
import pager
import swap

V1 = "cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
SWAPS = "Filename Type Size Used Priority\n"


class FakeKernel(swap.Kernel):
    """A directory that behaves like the kernel's files. The operation with number `fails` fails."""

    def __init__(self, root, mounts=V1, fails=None):
        super().__init__(root)
        self.fails, self.operations, self.log = fails, 0, []
        self.put("/proc/mounts", mounts)
        self.put("/proc/swaps", SWAPS)
        self.put("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
        self.put("/sys/fs/cgroup/cgroup.subtree_control", "cpu\n")
        self.put("/sys/fs/cgroup/unified/cgroup.controllers", "hugetlb\n")
        os.makedirs(self.path("/sys/fs/cgroup/memory"))

    def put(self, path, text):
        os.makedirs(os.path.dirname(self.path(path)), exist_ok=True)
        with open(self.path(path), "w") as file:
            file.write(text)

    def add_device(self, device, initstate="0"):
        self.put(f"/sys/block/{device}/initstate", initstate)
        self.put(f"/sys/block/{device}/comp_algorithm", "[lzo-rle] lzo lz4\n")
        for name in ("disksize", "reset"):
            self.put(f"/sys/block/{device}/{name}", "")

    def allow_hot_add(self):
        for name in ("hot_add", "hot_remove"):
            self.put(f"/sys/class/zram-control/{name}", "")

    def step(self, what):
        self.operations += 1
        self.log.append(what)
        if self.operations == self.fails:
            raise swap.Unavailable(f"{what} fails")

    def read(self, path):
        if path.endswith("/hot_add"):
            self.step("hot_add")
            self.add_device("zram7")
            return "7\n"
        return super().read(path)

    def write(self, path, value):
        self.step(f"{path.rpartition('/')[2]} {value}")
        super().write(path, value)
        if path.endswith("/disksize"):
            self.put(path.replace("disksize", "initstate"), "1")
        if path.endswith("/reset"):
            self.put(path.replace("reset", "initstate"), "0")
        if path.endswith("/hot_remove"):
            shutil.rmtree(self.path(f"/sys/block/zram{value}"))

    def make_directory(self, path):
        self.step("mkdir")
        super().make_directory(path)
        self.put(f"{path}/cgroup.procs", "")

    def remove_directory(self, path):
        self.step("rmdir")
        shutil.rmtree(self.path(path))

    def call(self, *command):
        self.step(" ".join(command))
        swaps = super().read("/proc/swaps")
        line = f"{command[-1]} partition 1 0 1\n"
        if command[0] == "swapon":
            self.put("/proc/swaps", swaps + line)
        if command[0] == "swapoff":
            self.put("/proc/swaps", swaps.replace(line, ""))

    def state(self):
        """The state that a run must restore: devices, their states, swaps, cgroups."""
        devices = {name: super(FakeKernel, self).read(f"/sys/block/{name}/initstate")
                   for name in os.listdir(self.path("/sys/block"))}
        return devices, super().read("/proc/swaps"), sorted(os.listdir(self.path("/sys/fs/cgroup/memory")))


class WithKernel(unittest.TestCase):
    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)

    def kernel(self, **options):
        root = self.stack.enter_context(tempfile.TemporaryDirectory())
        kernel = FakeKernel(root, **options)
        # The machine's own swap, on the first device.
        kernel.add_device("zram0", "1")
        kernel.put("/proc/swaps", SWAPS + "/dev/zram0 partition 1 0 -2\n")
        return kernel


class TestLimit(WithKernel):
    def test_the_hierarchy_with_the_memory_controller_is_found(self):
        self.assertEqual(swap.find_cgroups(self.kernel()), (1, "/sys/fs/cgroup/memory"))
        self.assertEqual(swap.find_cgroups(self.kernel(mounts=V2)), (2, "/sys/fs/cgroup"))
        without = self.kernel(mounts=V1.partition("\n")[2])
        with self.assertRaisesRegex(swap.Unavailable, "memory controller"):
            swap.find_cgroups(without)

    def test_the_limit_is_set_and_the_cgroup_removed(self):
        kernel = self.kernel()
        before = kernel.state()
        with contextlib.ExitStack() as undo:
            limit = swap.Limit(kernel, undo)
            limit.set(5 << 20)
            self.assertEqual(kernel.read(f"{limit.directory}/memory.limit_in_bytes"), str(5 << 20))
            self.assertNotEqual(kernel.state(), before)
        self.assertEqual(kernel.state(), before)

    def test_a_stopped_process_gets_memory_for_a_moment(self):
        kernel = self.kernel()
        with contextlib.ExitStack() as undo:
            limit = swap.Limit(kernel, undo)
            limit.set(5 << 20)
            files = [f"{limit.directory}/memory.{name}" for name in ("oom_control", "limit_in_bytes")]
            self.assertEqual(kernel.read(files[0]), "1", "the process is stopped, not killed")
            kernel.put(files[0], "oom_kill_disable 1\nunder_oom 1\n")
            with limit.rescued() as rescues:
                # Larger each time: an equal limit continues no process.
                while int(kernel.read(files[1]) or 0) < (5 << 20) + 2 * swap.RESCUE:
                    time.sleep(0.001)
                kernel.put(files[0], "oom_kill_disable 1\nunder_oom 0\n")
                while kernel.read(files[1]) != str(5 << 20):
                    time.sleep(0.001)
            self.assertGreaterEqual(len(rescues), 2)

    def test_version_2_takes_back_the_controller_that_it_has_enabled(self):
        kernel = self.kernel(mounts=V2)
        with contextlib.ExitStack() as undo:
            swap.Limit(kernel, undo).set(1)
        self.assertEqual(kernel.log, ["cgroup.subtree_control +memory", "mkdir", "memory.max 1", "rmdir",
                                      "cgroup.subtree_control -memory"])


class TestSwap(WithKernel):
    def test_a_new_device_is_added_and_removed(self):
        kernel = self.kernel()
        kernel.allow_hot_add()
        before = kernel.state()
        with swap.swap_on_zram(kernel, "lz4", 1 << 20):
            self.assertIn("/dev/zram7", kernel.state()[1])
        self.assertEqual(kernel.state(), before)
        self.assertEqual(kernel.log, ["hot_add", "comp_algorithm lz4", f"disksize {1 << 20}", "mkswap /dev/zram7",
                                      "swapon -p 32767 /dev/zram7", "swapoff /dev/zram7", "reset 1", "hot_remove 7"])

    def test_each_failing_step_is_reversed(self):
        for fails in range(1, 6):
            kernel = self.kernel(fails=fails)
            kernel.allow_hot_add()
            before = kernel.state()
            with self.assertRaises(swap.Unavailable), swap.swap_on_zram(kernel, "lz4", 1):
                self.fail("one step has failed")
            self.assertEqual(kernel.state(), before, f"step {fails}")

    def test_a_failing_reversal_does_not_stop_the_others(self):
        kernel = self.kernel(fails=6)
        kernel.allow_hot_add()
        with self.assertRaisesRegex(swap.Unavailable, "swapoff"):
            with swap.swap_on_zram(kernel, "lz4", 1):
                pass
        self.assertEqual(kernel.log[-2:], ["reset 1", "hot_remove 7"])

    def test_a_device_in_use_is_never_taken(self):
        kernel = self.kernel()
        before = kernel.state()
        with self.assertRaisesRegex(swap.Unavailable, "no zram device is free"):
            with swap.swap_on_zram(kernel, "lz4", 1):
                pass
        self.assertEqual((kernel.state(), kernel.log), (before, []))
        kernel.add_device("zram1")
        with swap.swap_on_zram(kernel, "lz4", 1):
            self.assertIn("/dev/zram1", kernel.state()[1])
        self.assertNotIn("hot_remove 1", kernel.log)
        self.assertIn("/dev/zram0", kernel.state()[1], "the swap of the machine")

    def test_an_unknown_compressor_is_refused(self):
        kernel = self.kernel()
        kernel.allow_hot_add()
        before = kernel.state()
        with self.assertRaisesRegex(swap.Unavailable, "no compressor zstd"):
            with swap.swap_on_zram(kernel, "zstd", 1):
                pass
        self.assertEqual(kernel.state(), before)

    def test_a_file_has_its_size_and_is_removed(self):
        kernel = self.kernel()
        path = kernel.path("/swap")
        with swap.swap_on_file(kernel, path, 1 << 20):
            self.assertEqual((os.stat(path).st_size, os.stat(path).st_mode & 0o777), (1 << 20, 0o600))
        self.assertFalse(os.path.exists(path))
        self.assertEqual(kernel.log[-1], f"swapoff {path}")

    def test_a_signal_during_the_set_up_takes_effect_after_it(self):
        kernel = self.kernel()
        kernel.allow_hot_add()
        before, add = kernel.state(), kernel.add_device

        def add_under_signal(device):
            os.kill(os.getpid(), signal.SIGTERM)
            add(device)

        kernel.add_device = add_under_signal
        old = signal.signal(signal.SIGTERM, pager.interrupt)
        self.addCleanup(signal.signal, signal.SIGTERM, old)
        with self.assertRaises(SystemExit) as ended:
            with swap.swap_on_zram(kernel, "lz4", 1):
                self.fail("the signal has ended the run")
        self.assertEqual(ended.exception.code, 128 + signal.SIGTERM)
        self.assertIn("swapon -p 32767 /dev/zram7", kernel.log)
        self.assertEqual(kernel.state(), before)


class TestProcesses(unittest.TestCase):
    def test_a_failed_program_gives_its_last_line(self):
        with self.assertRaisesRegex(pager.Failed, "exit code 3: no memory"):
            pager.run_process(["sh", "-c", "echo no memory >&2; exit 3"])
        with self.assertRaises(pager.Killed):
            pager.run_process(["sh", "-c", "kill -KILL $$"])
        with self.assertRaisesRegex(pager.TooSlow, "over 0 s"):
            pager.run_process(["sleep", "1000"], 0.01)

    def test_an_interrupted_program_is_ended(self):
        old = signal.signal(signal.SIGTERM, pager.interrupt)
        self.addCleanup(signal.signal, signal.SIGTERM, old)
        script = "echo $$ > $0; kill -TERM $PPID; exec sleep 1000"
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "pid")
            with self.assertRaises(SystemExit):
                pager.run_process(["sh", "-c", script, path])
            with open(path) as file, self.assertRaises(ProcessLookupError):
                os.kill(int(file.read()), 0)

    def test_an_output_without_a_program_is_no_result(self):
        job = pager.Job("patterns", ["backwards"], [], 1)
        with self.assertRaisesRegex(pager.Failed, "no output of backwards"):
            job.parse('{"program": "content", "checksum": "1"}\n', "", 1)


class TestTables(unittest.TestCase):
    RECORDS = [
        {"program": "LU", "system": system, "round": turn, "seconds": seconds, "checksum": "a"}
        for turn, row in enumerate([(1, 5, 2), (1, 3, 2), (2, 12, 3)])
        for system, seconds in zip(("plain", pager.ZRAM, "granary"), row)
    ]

    def test_ratios_are_of_one_round(self):
        numbers = pager.Numbers(self.RECORDS[:-1])
        self.assertEqual(numbers.ratios("LU", "granary", pager.ZRAM, "seconds"), [2 / 5, 2 / 3])
        numbers = pager.Numbers(self.RECORDS)
        self.assertEqual(numbers.losses("LU", "granary", pager.ZRAM, "seconds"), [1 / 4, 1 / 2, 1 / 10])

    def test_a_row_has_medians_and_extremes(self):
        text = pager.tables(self.RECORDS, ["plain", pager.ZRAM, "granary"])
        self.assertIn("| LU | 1 (1 to 2) | 5 (3 to 12) | 2 (2 to 3) |", text)
        self.assertTrue(text.rstrip().endswith("| 0.4 (0.25 to 0.667) | 0.25 (0.1 to 0.5) |"), text)
        self.assertNotIn("zram", pager.tables(self.RECORDS, ["plain", "granary"]))

    def test_sealed_pages_have_columns_of_their_own(self):
        sealed = [{**record, "system": pager.SEALED, "seconds": 3 * record["seconds"]}
                  for record in self.RECORDS if record["system"] == "granary"]
        text = pager.tables([*self.RECORDS, *sealed], ["plain", pager.ZRAM, "granary", pager.SEALED])
        self.assertIn("| granary-sealed over granary | granary-sealed over zram-lzo-rle |", text)
        self.assertIn("| 3 (3 to 3) | 1.2 (0.75 to 2) |", text)
        self.assertNotIn(pager.SEALED, pager.USUAL)

    def test_rescues_are_shown(self):
        record = {**self.RECORDS[1], "job": "LU", "rescues": 4}
        self.assertIn("LU on zram-lzo-rle (4 (4 to 4) times)", pager.tables([record], ["plain", pager.ZRAM]))
        self.assertNotIn("Reclaim failed", pager.tables(self.RECORDS, ["plain", pager.ZRAM]))

    def test_different_checksums_are_reported(self):
        self.assertEqual(pager.differences(self.RECORDS), [])
        other = {**self.RECORDS[-1], "checksum": "b"}
        self.assertEqual(pager.differences([*self.RECORDS, other]),
                         ["LU: a in granary, plain, zram-lzo-rle; b in granary"])

    def test_only_a_killed_job_is_repeated(self):
        class Bench:
            def __init__(self, error):
                self.error, self.calls = error, 0

            def run(self, system, job):
                self.calls += 1
                raise self.error

        job = pager.Job("LU", ["LU"], [], 1)
        for error, calls in ((pager.Failed("x"), 1), (pager.TooSlow("x"), 1), (pager.Killed("x"), 3)):
            bench = Bench(error)
            records, failed = pager.measure(bench, [job], ["plain"], 3, progress=lambda text: None)
            self.assertEqual((records, failed, bench.calls), ([], {("plain", "LU"): error}, calls))

    def test_a_cell_without_numbers_has_the_reason(self):
        text = pager.tables(self.RECORDS, ["plain", "file"], {("file", "LU"): pager.TooSlow("over 60 s")})
        self.assertIn("| LU | 1 (1 to 2) | over 60 s |", text)


class TestCommandLine(unittest.TestCase):
    def test_sizes(self):
        for text, size in (("4096", 4096), ("64MiB", 64 << 20), ("2g", 2 << 30), ("8K", 8 << 10)):
            self.assertEqual(pager.parse_size(text), size)
        for text in ("", "MiB", "x", "-1MiB", "0"):
            with self.assertRaises(argparse.ArgumentTypeError):
                pager.parse_size(text)

    def test_defaults_follow_other_options(self):
        args = pager.parse_arguments(["--memory", "64MiB", "--programs", "LU,backwards"])
        self.assertEqual((args.local, args.accesses, args.programs), (16 << 20, 8192, ["backwards", "LU"]))
        self.assertEqual(pager.parse_arguments(["--hogs", "1"]).accesses, 1024)

    def test_wrong_arguments_are_refused(self):
        for words in (["--programs", "quake"], ["--local", "1GiB"], ["--rounds", "0"], ["--systems", "nvme"]):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
                pager.parse_arguments(words)

    def test_without_root_no_cgroup_is_made(self):
        geteuid, os.geteuid = os.geteuid, lambda: 1000
        self.addCleanup(setattr, os, "geteuid", geteuid)
        bench = pager.Bench(1, 1, "", "")
        with contextlib.ExitStack() as undo:
            self.assertRegex(pager.set_up_limit(bench, undo), "root")
        self.assertIsNone(bench.limit)


if __name__ == "__main__":
    unittest.main()
