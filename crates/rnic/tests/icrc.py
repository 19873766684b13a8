# Checks the ICRC of each RoCEv2 packet in a capture of raw IP packets (pcap). The expected ICRC is computed by
# scapy for IPv4, and from the definition for IPv6, which scapy does not support. Prints the number of packets
# with the right ICRC; prints each packet with a wrong one and fails.
import struct
import sys
import zlib

from scapy.all import IP, UDP, raw
from scapy.contrib.roce import BTH


def over_ipv6(packet):
    masked = bytearray(packet[:-4])
    masked[0:4] = b"\x6f\xff\xff\xff"
    masked[7] = 0xff
    masked[40 + 6:40 + 8] = b"\xff\xff"
    masked[48 + 4] = 0xff
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + bytes(masked)))


def over_ipv4(packet):
    layers = IP(packet)
    layers[BTH].icrc = None
    return raw(layers)[-4:]


data = open(sys.argv[1], "rb").read()
at, number, wrong = 24, 0, 0
while at < len(data):
    length = struct.unpack("<I", data[at + 8:at + 12])[0]
    packet = data[at + 16:at + 16 + length]
    at += 16 + length
    number += 1
    want = over_ipv6(packet) if packet[0] >> 4 == 6 else over_ipv4(packet)
    if want != packet[-4:]:
        wrong += 1
        print("packet", number, "has ICRC", packet[-4:].hex(), "and should have", want.hex())
print(number - wrong, "agree")
sys.exit(1 if wrong else 0)
