// Objects, strings, typed arrays and buffers.
const count = Number(process.argv[2]);
const rows = [];
for (let i = 0; i < count; i++) rows.push({ id: (i * 7919) % 1000003, name: `row ${i}`, part: [i, i + 1] });
rows.sort((a, b) => a.id - b.id);
let sum = 0;
for (const row of rows) sum = (sum * 31 + row.id + row.part[1] + row.name.length) % 1000000007;
const numbers = new Float64Array(count * 8);
for (let i = 0; i < numbers.length; i++) numbers[i] = (i * 48271) % 2147483647;
numbers.sort();
const buffers = [];
for (let i = 0; i < 40; i++) buffers.push(Buffer.alloc(count, i + 1));
const joined = Buffer.concat(buffers);
const hash = require("crypto").createHash("sha256");
hash.update(joined);
hash.update(numbers);
console.log(sum, hash.digest("hex"), JSON.stringify(rows).length);
