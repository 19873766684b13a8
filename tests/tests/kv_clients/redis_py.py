"""Uses redis-py unmodified against a server. Argument: the port."""

import sys
import threading
import time

import redis

port = int(sys.argv[1])
client = redis.Redis(port=port, socket_timeout=60)


def equal(found, wanted):
    assert found == wanted, f"{found!r}, {wanted!r} expected"


def refused(call, kind=redis.ResponseError):
    try:
        found = call()
    except kind:
        return
    raise AssertionError(f"{found!r}, {kind.__name__} expected")


def strings():
    binary = bytes(range(256)) * 40
    equal(client.set("binary", binary), True)
    equal(client.get("binary"), binary)
    equal(client.get("none"), None)
    equal(client.set("binary", "x", nx=True), None)
    equal(client.set("binary", "y", xx=True, get=True), binary)
    equal(client.append("binary", "z"), 2)
    equal(client.setrange("binary", 4, "end"), 7)
    equal(client.get("binary"), b"yz\0\0end")
    equal(client.getrange("binary", -3, -1), b"end")
    equal(client.strlen("binary"), 7)
    equal(client.getdel("binary"), b"yz\0\0end")
    equal(client.exists("binary", "none"), 0)
    large = b"0123456789" * 300_000
    equal(client.set("large", large), True)
    equal(client.get("large"), large)
    equal(client.delete("large", "none"), 1)


def numbers():
    equal(client.incr("number", 5), 5)
    equal(client.decr("number"), 4)
    equal(client.incrbyfloat("number", "0.5"), 4.5)
    refused(lambda: client.incr("number"))
    equal(client.setbit("bits", 7, 1), 0)
    equal(client.getbit("bits", 7), 1)
    equal(client.bitcount("bits"), 1)


def many_keys():
    equal(client.mset({f"many:{i}": i for i in range(500)}), True)
    equal(client.mget("many:7", "none", "many:499"), [b"7", None, b"499"])
    equal(client.msetnx({"many:7": 1, "other": 1}), False)
    found = set(client.scan_iter(match="many:*", count=50))
    equal(len(found), 500)
    equal(len(client.keys("many:4?")), 10)
    equal(client.unlink(*found), 500)
    equal(client.rename("number", "renamed"), True)
    equal(client.type("renamed"), b"string")
    equal(client.copy("renamed", "copied"), True)
    equal(client.get("copied"), b"4.5")


def expiry():
    equal(client.set("short", 1, px=40), True)
    assert 0 < client.pttl("short") <= 40
    while client.get("short") is not None:
        time.sleep(0.005)
    equal(client.ttl("short"), -2)
    equal(client.setex("long", 100, 1), True)
    equal(client.persist("long"), True)
    equal(client.ttl("long"), -1)
    equal(client.expire("long", 50), True)
    equal(client.getex("long", persist=True), b"1")
    equal(client.ttl("long"), -1)


def pipelines():
    pipe = client.pipeline(transaction=False)
    for i in range(1000):
        pipe.set(f"pipe:{i}", i)
        pipe.get(f"pipe:{i}")
    results = pipe.execute()
    equal(results[1::2], [str(i).encode() for i in range(1000)])
    with client.pipeline() as transaction:
        transaction.watch("pipe:1")
        client.set("pipe:1", "changed")
        transaction.multi()
        transaction.set("pipe:1", "lost")
        refused(transaction.execute, redis.WatchError)

    def count(pipe):
        pipe.multi()
        pipe.incr("counter")

    equal(client.transaction(count, "counter"), [1])
    equal(client.get("pipe:1"), b"changed")


def messages():
    received = []
    channel = client.pubsub(ignore_subscribe_messages=False)
    channel.subscribe("news")
    channel.psubscribe("n*")
    confirmed = [channel.get_message(timeout=60) for _ in range(2)]
    equal([message["type"] for message in confirmed], ["subscribe", "psubscribe"])
    equal(client.publish("news", "hello"), 2)
    received = [channel.get_message(timeout=60) for _ in range(2)]
    equal({message["type"] for message in received}, {"message", "pmessage"})
    equal({message["data"] for message in received}, {b"hello"})
    equal(client.pubsub_numsub("news"), [(b"news", 1)])
    channel.close()


def dumps():
    client.set("dumped", "content")
    image = client.dump("dumped")
    equal(client.restore("restored", 0, image), b"OK")
    equal(client.get("restored"), b"content")
    refused(lambda: client.restore("restored", 0, image))


def refusals():
    refused(lambda: client.lpush("list", 1))
    refused(lambda: client.execute_command("NONSENSE"))
    refused(lambda: client.execute_command("GET"))
    equal(client.ping(), True)


def administration():
    info = client.info()
    assert info["redis_version"].startswith("7.0"), info
    assert client.config_get("maxmemory")["maxmemory"].isdigit()
    name = client.client_setname("tester")
    equal(name, True)
    assert any(entry["name"] == "tester" for entry in client.client_list())
    assert client.memory_usage("copied") > 0
    assert client.dbsize() > 1000
    equal(client.object("encoding", "copied") in (b"embstr", b"raw", b"int"), True)
    assert "get" in client.command()
    equal(client.time()[0] > 0, True)


def threads_share_a_pool():
    def count():
        for _ in range(200):
            client.incr("shared")

    threads = [threading.Thread(target=count) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    equal(client.get("shared"), b"800")


def reconnection():
    other = redis.Redis(port=port, retry_on_timeout=True)
    identity = other.client_id()
    equal(client.client_kill_filter(_id=identity), 1)
    # Another thread of the server may serve the connection, and ends it a little later.
    while any(int(entry["id"]) == identity for entry in client.client_list()):
        pass
    equal(other.ping(), True)
    assert other.client_id() != identity


for test in [strings, numbers, many_keys, expiry, pipelines, messages, dumps, refusals,
             administration, threads_share_a_pool, reconnection]:
    try:
        test()
    except BaseException:
        print("failed:", test.__name__, file=sys.stderr)
        raise
print("done")
