"""A pool of forked processes, a queue that two of them fill, and a lock that they share."""
import hashlib, multiprocessing as mp, sys

mp.set_start_method("fork")
data = [str(i) * 5 for i in range(int(sys.argv[1]))]

def work(part):
    local = [x + "!" for x in data[part::4]]
    return part, hashlib.sha256("".join(local).encode()).hexdigest()

def producer(queue, n):
    for i in range(500):
        queue.put((n, i, data[(i * 7919) % len(data)]))
    queue.put(None)

def add(value):
    for _ in range(100):
        with value.get_lock():
            value.value += 1

with mp.Pool(2) as pool:
    for part, digest in sorted(pool.imap_unordered(work, range(4))):
        print(part, digest)
queue = mp.Queue()
processes = [mp.Process(target=producer, args=(queue, n)) for n in range(2)]
[process.start() for process in processes]
got, ends = [], 0
while ends < 2:
    item = queue.get()
    if item is None:
        ends += 1
    else:
        got.append(item)
[process.join() for process in processes]
print(len(got), hashlib.sha256(repr(sorted(got)).encode()).hexdigest(), [p.exitcode for p in processes])
value = mp.Value("i", 0)
processes = [mp.Process(target=add, args=(value,)) for _ in range(3)]
[process.start() for process in processes]
[process.join() for process in processes]
print(value.value)
