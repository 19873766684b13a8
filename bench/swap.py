"""Kernel swap for one measurement: a memory cgroup with a limit, and a swap device on zram or in a file.

All of it is made by this module and removed again by `close`: the limit's cgroup, the swap, the zram device. A zram
device or a swap that exists before is never touched. Paths below /sys and /proc are relative to `Kernel.root`, and
commands run through `Kernel.call`, so that tests work on a directory with a copy of these files.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time

# The name of the cgroup begins with it.
CGROUP = "granary-peers"
# Bytes by which the limit is raised for a moment.
RESCUE = 256 << 10
# Signals that end a measurement early.
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# The largest priority: the kernel uses this swap before any other swap of the machine.
PRIORITY = 32767


class Unavailable(Exception):
    """This machine cannot set up a kind of swap. The text is the reason."""


@contextlib.contextmanager
def undisturbed():
    """Delays signals that end the measurement, so that no step runs without its reversal on record."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Kernel:
    """The files and the commands of the kernel's swap."""

    def __init__(self, root="/"):
        self.root = root

    def path(self, path):
        return os.path.join(self.root, path.lstrip("/"))

    def read(self, path):
        try:
            with open(self.path(path)) as file:
                return file.read()
        except OSError as error:
            raise Unavailable(f"read {path}: {error.strerror}")

    def write(self, path, value):
        try:
            with open(self.path(path), "w") as file:
                file.write(str(value))
        except OSError as error:
            raise Unavailable(f"write {value} to {path}: {error.strerror}")

    def exists(self, path):
        return os.path.exists(self.path(path))

    def make_directory(self, path):
        try:
            os.mkdir(self.path(path))
        except OSError as error:
            raise Unavailable(f"make {path}: {error.strerror}")

    def remove_directory(self, path):
        """Removes a cgroup, whose files vanish with the directory."""
        os.rmdir(self.path(path))

    def call(self, *command):
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        except OSError as error:
            raise Unavailable(f"{command[0]}: {error.strerror}")
        if done.returncode != 0:
            raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


# --- the limit ----------------------------------------------------------------------------------


def find_cgroups(kernel):
    """The version (1 or 2) and the directory of the hierarchy that has the memory controller."""
    unified = None
    for line in kernel.read("/proc/mounts").splitlines():
        _, directory, kind, options = line.split()[:4]
        if kind == "cgroup" and "memory" in options.split(","):
            return 1, directory
        if kind == "cgroup2":
            unified = directory
    if unified and "memory" in kernel.read(f"{unified}/cgroup.controllers").split():
        return 2, unified
    raise Unavailable("no cgroup hierarchy has the memory controller")


class Limit:
    """A memory cgroup. `enter` moves the calling process into it."""

    def __init__(self, kernel, undo):
        self.kernel = kernel
        self.version, top = find_cgroups(kernel)
        if self.version == 2:
            control = f"{top}/cgroup.subtree_control"
            if "memory" not in kernel.read(control).split():
                kernel.write(control, "+memory")
                undo.callback(kernel.write, control, "-memory")
        self.directory = f"{top}/{CGROUP}-{os.getpid()}"
        kernel.make_directory(self.directory)
        undo.callback(self.remove)

    def set(self, limit_bytes):
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        self.kernel.write(f"{self.directory}/{name}", limit_bytes)
        self.bytes = limit_bytes
        if self.version == 1:
            # Reclaim that finds no page stops the process until `rescued` continues it.
            self.kernel.write(f"{self.directory}/memory.oom_control", 1)

    @contextlib.contextmanager
    def rescued(self):
        """Continues processes for which reclaim has failed. Gives a list whose length is their number.

        With classic LRU lists reclaim fails at times in a cgroup that thrashes although swap is free, and the kernel
        kills a process. Version 1 can stop the process instead; raising the limit for a moment continues it.
        """
        rescues, ended = [], threading.Event()
        if self.version != 1:
            yield rescues
            return
        thread = threading.Thread(target=self.rescue, args=(rescues, ended))
        with undisturbed():
            # The thread takes no signals.
            thread.start()
        try:
            yield rescues
        finally:
            ended.set()
            thread.join()

    def rescue(self, rescues, ended):
        limit, raised = f"{self.directory}/memory.limit_in_bytes", 0
        while not ended.wait(0.01):
            if "under_oom 1" in self.kernel.read(f"{self.directory}/memory.oom_control"):
                rescues.append(time.monotonic())
                # Only a larger limit than before continues the process.
                raised += RESCUE
                self.kernel.write(limit, self.bytes + raised)
            elif raised:
                # Fails as long as reclaim fails.
                with contextlib.suppress(Unavailable):
                    self.kernel.write(limit, self.bytes)
                    raised = 0

    def enter(self):
        """For `preexec_fn` of a new process."""
        with open(self.kernel.path(f"{self.directory}/cgroup.procs"), "w") as file:
            file.write(str(os.getpid()))

    def processes(self):
        return [int(word) for word in self.kernel.read(f"{self.directory}/cgroup.procs").split()]

    def empty(self):
        """Ends the processes in the cgroup, which this measurement has started."""
        for _ in range(500):
            left = self.processes()
            if not left:
                return
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        raise Unavailable(f"processes {left} in {self.directory} do not end")

    def remove(self):
        self.empty()
        # The kernel may hold an empty cgroup for a moment.
        for _ in range(500):
            try:
                return self.kernel.remove_directory(self.directory)
            except OSError as error:
                reason = error.strerror
            time.sleep(0.01)
        raise Unavailable(f"remove {self.directory}: {reason}")


# --- swap ---------------------------------------------------------------------------------------


def zram_algorithms(kernel, device):
    """The names of the compressors of a zram device, of which the chosen one is in brackets."""
    return kernel.read(f"/sys/block/{device}/comp_algorithm").replace("[", "").replace("]", "").split()


def is_unused(kernel, device):
    """True for a zram device without a size, which therefore holds nothing and backs no swap."""
    return kernel.read(f"/sys/block/{device}/initstate").strip() == "0" and all(
        line.split()[0] != f"/dev/{device}" for line in kernel.read("/proc/swaps").splitlines()[1:])


def add_zram(kernel, undo):
    """Returns the name of a zram device of our own: a new one, or one that has not been set up."""
    if kernel.exists("/sys/class/zram-control/hot_add"):
        device = f"zram{kernel.read('/sys/class/zram-control/hot_add').strip()}"
        undo.callback(kernel.write, "/sys/class/zram-control/hot_remove", device[4:])
        return device
    names = os.listdir(kernel.path("/sys/block")) if kernel.exists("/sys/block") else []
    for device in sorted(name for name in names if name.startswith("zram")):
        if is_unused(kernel, device):
            return device
    raise Unavailable("no zram device is free; load the module with `modprobe zram`")


@contextlib.contextmanager
def swap_on_zram(kernel, algorithm, size):
    """Swap on a zram device, as long as the context lasts."""
    with reversible() as undo:
        device = add_zram(kernel, undo)
        if algorithm not in zram_algorithms(kernel, device):
            raise Unavailable(f"zram has no compressor {algorithm}")
        undo.callback(kernel.write, f"/sys/block/{device}/reset", 1)
        kernel.write(f"/sys/block/{device}/comp_algorithm", algorithm)
        kernel.write(f"/sys/block/{device}/disksize", size)
        swap_on(kernel, f"/dev/{device}", undo)
        with disturbed():
            yield


@contextlib.contextmanager
def swap_on_file(kernel, path, size):
    """Swap in a new file, as long as the context lasts."""
    with reversible() as undo:
        with open(path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            undo.callback(os.unlink, path)
            os.posix_fallocate(file.fileno(), 0, size)
        swap_on(kernel, path, undo)
        with disturbed():
            yield


def swap_on(kernel, path, undo):
    kernel.call("mkswap", path)
    kernel.call("swapon", "-p", str(PRIORITY), path)
    undo.callback(kernel.call, "swapoff", path)


@contextlib.contextmanager
def reversible():
    """A stack of reversals, which signals interrupt neither while it grows nor while it runs."""
    with undisturbed(), contextlib.ExitStack() as undo:
        yield undo


@contextlib.contextmanager
def disturbed():
    """Within [`undisturbed`]: signals end the measurement here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        # A signal that has arrived meanwhile takes effect in this call.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
