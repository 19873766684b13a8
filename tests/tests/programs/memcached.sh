# memcached.sh DIRECTORY ITEMS: stores items, reads them back, and changes a part of them.
d=$1
rm -f "$d/socket"
memcached -u root -s "$d/socket" -m 1024 -t 2 &
server=$!
/usr/bin/python3 - "$d/socket" "$2" <<'END'
import hashlib, socket, sys, time
path, count = sys.argv[1], int(sys.argv[2])
while True:
    try:
        client = socket.socket(socket.AF_UNIX); client.connect(path); break
    except OSError:
        client.close(); time.sleep(0.02)
stream = client.makefile("rwb")
def value(i, round): return (b"%d " % (i * 7919 + round)) * (20 + i % 90)
def put(i, round):
    v = value(i, round)
    stream.write(b"set key%d 0 0 %d noreply\r\n" % (i, len(v)) + v + b"\r\n")
for i in range(count): put(i, 0)
for i in range(0, count, 3): put(i, 1)
digest = hashlib.sha256()
for i in range(count):
    stream.write(b"get key%d\r\n" % i); stream.flush()
    line = stream.readline().split()
    data = stream.read(int(line[3]) + 2); stream.readline()
    assert data[:-2] == value(i, i % 3 == 0), i
    digest.update(data)
print(count, digest.hexdigest())
END
kill $server
wait $server
exit 0
