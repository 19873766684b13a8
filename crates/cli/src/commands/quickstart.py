# The python3 program of `granary quickstart` and of `bench/peers pager`.
import sys, zlib
records = []
with open(sys.argv[1], encoding='utf-8', newline='\n') as lines:
    for line in lines:
        records.append((line.split(), zlib.crc32(line.encode())))
for number, (this, following) in enumerate(zip(records, records[1:])):
    print(number, len(set(this[0]) & set(following[0])), this[1])
