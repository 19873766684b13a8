// Uses node-redis unmodified against a server. Argument: the port.
const assert = require('node:assert');
const { createClient, commandOptions, WatchError } = require('redis');

const url = `redis://127.0.0.1:${process.argv[2]}`;

const pause = () => new Promise((done) => setTimeout(done, 5));

async function strings(client) {
  assert.equal(await client.set('greeting', 'hello'), 'OK');
  assert.equal(await client.get('greeting'), 'hello');
  assert.equal(await client.get('none'), null);
  assert.equal(await client.set('greeting', 'other', { NX: true }), null);
  assert.equal(await client.set('greeting', 'other', { XX: true, GET: true }), 'hello');
  const binary = Buffer.from(Array.from({ length: 5000 }, (_, at) => at % 256));
  await client.set('binary', binary);
  const found = await client.get(commandOptions({ returnBuffers: true }), 'binary');
  assert.ok(found.equals(binary));
  assert.equal(await client.incrBy('number', 7), 7);
  assert.equal(await client.incrByFloat('number', 0.25), '7.25');
  await assert.rejects(client.incr('greeting'), /not an integer/);
}

async function manyKeys(client) {
  const keys = Array.from({ length: 300 }, (_, at) => `many:${at}`);
  await client.mSet(Object.fromEntries(keys.map((key) => [key, key])));
  assert.deepEqual(await client.mGet(['many:3', 'none']), ['many:3', null]);
  const found = new Set();
  for await (const key of client.scanIterator({ MATCH: 'many:*', COUNT: 40 })) found.add(key);
  assert.equal(found.size, keys.length);
  assert.equal(await client.del(keys), keys.length);
}

// node-redis sends commands of one turn of its event loop as one pipeline.
async function pipelines(client) {
  const asked = Array.from({ length: 2000 }, (_, at) => client.set(`pipe:${at}`, `${at}`));
  assert.ok((await Promise.all(asked)).every((reply) => reply === 'OK'));
  assert.equal(await client.get('pipe:1999'), '1999');
}

async function transactions(client) {
  const [first, second] = await client.multi().set('t', '1').incr('t').exec();
  assert.deepEqual([first, second], ['OK', 2]);
  await assert.rejects(client.executeIsolated(async (isolated) => {
    await isolated.watch('t');
    await client.set('t', 'changed');
    return isolated.multi().set('t', 'lost').exec();
  }), WatchError);
  assert.equal(await client.get('t'), 'changed');
}

async function expiry(client) {
  await client.set('short', '1', { PX: 40 });
  while ((await client.get('short')) !== null) await pause();
  await client.setEx('long', 100, '1');
  const left = await client.ttl('long');
  assert.ok(left > 90 && left <= 100, `${left} s`);
  assert.equal(await client.persist('long'), true);
}

async function messages(client) {
  const listener = client.duplicate();
  await listener.connect();
  const received = new Promise((done) => listener.subscribe('news', done));
  while ((await client.publish('news', 'hello')) === 0) await pause();
  assert.equal(await received, 'hello');
  await listener.unsubscribe('news');
  await listener.quit();
}

async function administration(client) {
  assert.match(await client.info('server'), /redis_version:7\.0/);
  assert.ok((await client.dbSize()) > 1000);
  await client.clientSetName('tester');
  assert.equal(await client.clientGetName(), 'tester');
  await assert.rejects(client.sendCommand(['NONSENSE']), /unknown command/);
  await assert.rejects(client.lPush('list', '1'));
  assert.equal(await client.ping(), 'PONG');
}

async function main() {
  const client = createClient({ url });
  client.on('error', (error) => { throw error; });
  await client.connect();
  const tests = [strings, manyKeys, pipelines, transactions, expiry, messages, administration];
  for (const test of tests) {
    try {
      await test(client);
    } catch (error) {
      console.error(`failed: ${test.name}`);
      throw error;
    }
  }
  await client.quit();
  console.log('done');
}

main().catch((error) => { console.error(error); process.exit(1); });
