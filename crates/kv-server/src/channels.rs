//! Channels and patterns with their subscribers, and the delivery of messages.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;
use redis_formats::glob;
use redis_formats::reply::{Protocol, Writer};

use crate::client::{Client, OutputLimit};

type Subscribers = HashMap<Arc<[u8]>, Vec<Arc<Client>>>;

/// The subscribers of all channels and patterns.
#[derive(Debug, Default)]
pub(crate) struct Channels {
    channels: RwLock<Subscribers>,
    patterns: RwLock<Subscribers>,
    shards: RwLock<Subscribers>,
    /// Number of subscriptions, so that PUBLISH without a subscriber takes no lock.
    count: AtomicUsize,
}

/// Kind of a subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    Channel,
    Pattern,
    /// A channel of one shard of a cluster. Without a cluster, a second set of channels.
    Shard,
}

impl To {
    pub const ALL: [Self; 3] = [Self::Channel, Self::Pattern, Self::Shard];
}

impl Channels {
    fn table(&self, to: To) -> &RwLock<Subscribers> {
        match to {
            To::Channel => &self.channels,
            To::Pattern => &self.patterns,
            To::Shard => &self.shards,
        }
    }

    pub fn subscribe(&self, to: To, name: &Arc<[u8]>, client: &Arc<Client>) {
        let mut table = self.table(to).write();
        table.entry(name.clone()).or_default().push(client.clone());
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    pub fn unsubscribe(&self, to: To, name: &[u8], client: &Client) {
        let mut table = self.table(to).write();
        let Some(subscribers) = table.get_mut(name) else { return };
        let before = subscribers.len();
        subscribers.retain(|other| other.id != client.id);
        self.count.fetch_sub(before - subscribers.len(), Ordering::Relaxed);
        if subscribers.is_empty() {
            table.remove(name);
        }
    }

    /// Delivers a message. Returns the number of deliveries.
    pub fn publish(&self, channel: &[u8], message: &[u8], limit: OutputLimit) -> usize {
        if self.count.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let mut deliveries = 0;
        if let Some(subscribers) = self.channels.read().get(channel) {
            for client in subscribers {
                let protocol = client.protocol();
                client.send(limit, |mail| write(mail, protocol, "message", channel, message));
                deliveries += 1;
            }
        }
        for (pattern, subscribers) in self.patterns.read().iter() {
            if !glob::matches(pattern, channel) {
                continue;
            }
            for client in subscribers {
                let protocol = client.protocol();
                client.send(limit, |mail| write_by(mail, protocol, pattern, channel, message));
                deliveries += 1;
            }
        }
        deliveries
    }

    /// Delivers a message to the subscribers of a shard channel. Returns their number.
    pub fn publish_in_shard(&self, channel: &[u8], message: &[u8], limit: OutputLimit) -> usize {
        let shards = self.shards.read();
        let subscribers = shards.get(channel).map_or(&[][..], Vec::as_slice);
        for client in subscribers {
            let protocol = client.protocol();
            client.send(limit, |mail| write(mail, protocol, "smessage", channel, message));
        }
        subscribers.len()
    }

    /// The channels with subscribers that `pattern` matches.
    pub fn matching(&self, to: To, pattern: Option<&[u8]>) -> Vec<Arc<[u8]>> {
        let channels = self.table(to).read();
        let wanted = |name: &&Arc<[u8]>| pattern.is_none_or(|own| glob::matches(own, name));
        channels.keys().filter(wanted).cloned().collect()
    }

    /// The number of subscribers of a channel.
    pub fn subscribers(&self, to: To, channel: &[u8]) -> usize {
        self.table(to).read().get(channel).map_or(0, Vec::len)
    }

    /// The number of channels or patterns.
    pub fn count(&self, to: To) -> usize {
        self.table(to).read().len()
    }
}

fn write(mail: &mut Vec<u8>, protocol: Protocol, kind: &str, channel: &[u8], message: &[u8]) {
    let mut writer = Writer::new(mail, protocol);
    writer.push(3);
    writer.bulk(kind);
    writer.bulk(channel);
    writer.bulk(message);
}

/// Writes a message to a channel that a pattern matches.
fn write_by(
    mail: &mut Vec<u8>,
    protocol: Protocol,
    pattern: &[u8],
    channel: &[u8],
    message: &[u8],
) {
    let mut writer = Writer::new(mail, protocol);
    writer.push(4);
    writer.bulk("pmessage");
    writer.bulk(pattern);
    writer.bulk(channel);
    writer.bulk(message);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(id: u64) -> Arc<Client> {
        Client::for_tests(id)
    }

    #[test]
    fn messages_reach_channels_and_patterns() {
        let (channels, limit) = (Channels::default(), OutputLimit::default());
        let (one, two) = (client(1), client(2));
        assert_eq!(channels.publish(b"news", b"x", limit), 0);
        channels.subscribe(To::Channel, &Arc::from(&b"news"[..]), &one);
        channels.subscribe(To::Pattern, &Arc::from(&b"n*"[..]), &one);
        channels.subscribe(To::Pattern, &Arc::from(&b"n*"[..]), &two);
        two.set_protocol(Protocol::Resp3);
        assert_eq!(channels.publish(b"news", b"x", limit), 3);
        assert_eq!(channels.publish(b"other", b"x", limit), 0);
        let mut mail = Vec::new();
        two.take_mail(&mut mail);
        assert_eq!(mail, b">4\r\n$8\r\npmessage\r\n$2\r\nn*\r\n$4\r\nnews\r\n$1\r\nx\r\n");
        channels.unsubscribe(To::Pattern, b"n*", &one);
        channels.unsubscribe(To::Pattern, b"n*", &one);
        assert_eq!(channels.publish(b"news", b"x", limit), 2);
        channels.unsubscribe(To::Channel, b"news", &one);
        channels.unsubscribe(To::Pattern, b"n*", &two);
        assert_eq!(channels.publish(b"news", b"x", limit), 0);
        assert_eq!(To::ALL.map(|to| channels.count(to)), [0; 3]);
    }

    #[test]
    fn subscriber_that_does_not_read_is_killed_at_the_hard_limit() {
        let channels = Channels::default();
        let limit = OutputLimit { hard: 1000, soft: 0, soft_s: 0 };
        let slow = client(1);
        channels.subscribe(To::Channel, &Arc::from(&b"c"[..]), &slow);
        for _ in 0..15 {
            channels.publish(b"c", &[b'x'; 20], limit);
        }
        assert!(!slow.has(crate::client::flag::KILLED));
        channels.publish(b"c", &[b'x'; 1000], limit);
        assert!(slow.has(crate::client::flag::KILLED));
    }
}
