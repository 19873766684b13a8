//! Commands of a connection, and messages between connections.

use super::{Command, Group, Id, command, spec};
use crate::command::bits::category::{CONNECTION, NONE};
use crate::command::bits::flag::{
    ADMIN, ALLOW_BUSY, FAST, LOADING, NO_AUTH, NOSCRIPT, PUBSUB, STALE,
};
use crate::command::bits::key::NOT_KEY;

pub(super) const SESSION: &[Command] = &[
    command(Id::Subscribe, "subscribe", -2, "2.0.0", "Subscribes to channels.")
        .flags(PUBSUB | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Pubsub, NONE),
    command(
        Id::Psubscribe,
        "psubscribe",
        -2,
        "2.0.0",
        "Subscribes to all channels that match patterns.",
    )
    .flags(PUBSUB | NOSCRIPT | LOADING | STALE)
    .in_group(Group::Pubsub, NONE),
    command(Id::Unsubscribe, "unsubscribe", -1, "2.0.0", "Ends subscriptions to channels.")
        .flags(PUBSUB | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Pubsub, NONE),
    command(Id::Punsubscribe, "punsubscribe", -1, "2.0.0", "Ends subscriptions to patterns.")
        .flags(PUBSUB | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Pubsub, NONE),
    command(Id::Ssubscribe, "ssubscribe", -2, "7.0.0", "Subscribes to shard channels.")
        .flags(PUBSUB | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Pubsub, NONE)
        .keys(1, -1, 1, &[spec(1, -1, 1, NOT_KEY)]),
    command(Id::Sunsubscribe, "sunsubscribe", -1, "7.0.0", "Ends subscriptions to shard channels.")
        .flags(PUBSUB | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Pubsub, NONE)
        .keys(1, -1, 1, &[spec(1, -1, 1, NOT_KEY)]),
    command(Id::Spublish, "spublish", 3, "7.0.0", "Sends a message to a shard channel.")
        .flags(PUBSUB | LOADING | STALE | FAST)
        .in_group(Group::Pubsub, NONE)
        .keys(1, 1, 1, &[spec(1, 0, 1, NOT_KEY)]),
    command(Id::Publish, "publish", 3, "2.0.0", "Sends a message to a channel.")
        .flags(PUBSUB | LOADING | STALE | FAST)
        .in_group(Group::Pubsub, NONE),
    command(Id::Pubsub, "pubsub", -2, "2.8.0", "Shows channels and subscriptions.")
        .in_group(Group::Pubsub, NONE)
        .subcommands(PUBSUB_SUBCOMMANDS),
    command(Id::Ping, "ping", -1, "1.0.0", "Answers PONG or the given message.")
        .flags(FAST)
        .in_group(Group::Connection, CONNECTION)
        .tips(&["request_policy:all_shards", "response_policy:all_succeeded"]),
    command(Id::Echo, "echo", 2, "1.0.0", "Returns the given message.")
        .flags(LOADING | STALE | FAST)
        .in_group(Group::Connection, CONNECTION),
    command(
        Id::Hello,
        "hello",
        -1,
        "6.0.0",
        "Selects the version of the protocol and may authenticate the connection.",
    )
    .flags(NOSCRIPT | LOADING | STALE | FAST | NO_AUTH | ALLOW_BUSY)
    .in_group(Group::Connection, CONNECTION),
    command(Id::Auth, "auth", -2, "1.0.0", "Authenticates the connection.")
        .flags(NOSCRIPT | LOADING | STALE | FAST | NO_AUTH | ALLOW_BUSY)
        .in_group(Group::Connection, CONNECTION),
    command(Id::Reset, "reset", 1, "6.2.0", "Returns the connection to its initial state.")
        .flags(NOSCRIPT | LOADING | STALE | FAST | NO_AUTH | ALLOW_BUSY)
        .in_group(Group::Connection, CONNECTION),
    command(Id::Quit, "quit", -1, "1.0.0", "Closes the connection.")
        .flags(NOSCRIPT | LOADING | STALE | FAST | NO_AUTH | ALLOW_BUSY)
        .in_group(Group::Connection, CONNECTION),
    command(Id::Select, "select", 2, "1.0.0", "Selects the database of the connection.")
        .flags(LOADING | STALE | FAST)
        .in_group(Group::Connection, CONNECTION),
    command(Id::Client, "client", -2, "2.4.0", "Shows and controls connections.")
        .in_group(Group::Connection, NONE)
        .subcommands(CLIENT_SUBCOMMANDS),
];

const PUBSUB_SUBCOMMANDS: &[Command] = &[
    command(
        Id::PubsubChannels,
        "channels",
        -2,
        "2.8.0",
        "Lists the channels that have subscribers.",
    )
    .flags(PUBSUB | LOADING | STALE)
    .in_group(Group::Pubsub, NONE),
    command(Id::PubsubHelp, "help", 2, "6.2.0", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Pubsub, NONE),
    command(
        Id::PubsubNumpat,
        "numpat",
        2,
        "2.8.0",
        "Returns the number of patterns that have subscribers.",
    )
    .flags(PUBSUB | LOADING | STALE)
    .in_group(Group::Pubsub, NONE),
    command(
        Id::PubsubNumsub,
        "numsub",
        -2,
        "2.8.0",
        "Returns the number of subscribers of channels.",
    )
    .flags(PUBSUB | LOADING | STALE)
    .in_group(Group::Pubsub, NONE),
    command(
        Id::PubsubShardchannels,
        "shardchannels",
        -2,
        "7.0.0",
        "Lists the shard channels that have subscribers.",
    )
    .flags(PUBSUB | LOADING | STALE)
    .in_group(Group::Pubsub, NONE),
    command(
        Id::PubsubShardnumsub,
        "shardnumsub",
        -2,
        "7.0.0",
        "Returns the number of subscribers of shard channels.",
    )
    .flags(PUBSUB | LOADING | STALE)
    .in_group(Group::Pubsub, NONE),
];

const CLIENT_SUBCOMMANDS: &[Command] = &[
    command(
        Id::ClientCaching,
        "caching",
        3,
        "6.0.0",
        "Is refused, because no connection has tracking.",
    )
    .flags(NOSCRIPT | LOADING | STALE)
    .in_group(Group::Connection, CONNECTION),
    command(
        Id::ClientGetredir,
        "getredir",
        2,
        "6.0.0",
        "Returns that messages about changed keys go nowhere.",
    )
    .flags(NOSCRIPT | LOADING | STALE)
    .in_group(Group::Connection, CONNECTION),
    command(Id::ClientGetname, "getname", 2, "2.6.9", "Returns the name of the connection.")
        .flags(NOSCRIPT | LOADING | STALE)
        .in_group(Group::Connection, CONNECTION),
    command(Id::ClientHelp, "help", 2, "5.0.0", "Lists the subcommands.")
        .flags(LOADING | STALE)
        .in_group(Group::Connection, CONNECTION),
    command(Id::ClientId, "id", 2, "5.0.0", "Returns the number of the connection.")
        .flags(NOSCRIPT | LOADING | STALE)
        .in_group(Group::Connection, CONNECTION),
    command(Id::ClientInfo, "info", 2, "6.2.0", "Describes the connection.")
        .flags(NOSCRIPT | LOADING | STALE)
        .in_group(Group::Connection, CONNECTION)
        .tips(&["nondeterministic_output"]),
    command(Id::ClientKill, "kill", -3, "2.4.0", "Closes connections.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Connection, CONNECTION),
    command(Id::ClientList, "list", -2, "2.4.0", "Describes all connections.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Connection, CONNECTION)
        .tips(&["nondeterministic_output"]),
    command(
        Id::ClientNoEvict,
        "no-evict",
        3,
        "7.0.0",
        "Exempts the connection from the eviction of clients.",
    )
    .flags(ADMIN | NOSCRIPT | LOADING | STALE)
    .in_group(Group::Connection, CONNECTION),
    command(
        Id::ClientNoTouch,
        "no-touch",
        3,
        "7.2.0",
        "Switches off and on that reads of the connection count as uses of keys.",
    )
    .flags(NOSCRIPT | LOADING | STALE)
    .in_group(Group::Connection, CONNECTION),
    command(
        Id::ClientPause,
        "pause",
        -3,
        "2.9.50",
        "Holds the commands of all clients for a time.",
    )
    .flags(ADMIN | NOSCRIPT | LOADING | STALE)
    .in_group(Group::Connection, CONNECTION),
    command(
        Id::ClientReply,
        "reply",
        3,
        "3.2.0",
        "Switches the replies of the connection off and on.",
    )
    .flags(NOSCRIPT | LOADING | STALE)
    .in_group(Group::Connection, CONNECTION),
    command(
        Id::ClientSetinfo,
        "setinfo",
        4,
        "7.2.0",
        "Tells the name or the version of the client's library.",
    )
    .flags(NOSCRIPT | LOADING | STALE)
    .in_group(Group::Connection, CONNECTION),
    command(Id::ClientSetname, "setname", 3, "2.6.9", "Names the connection.")
        .flags(NOSCRIPT | LOADING | STALE)
        .in_group(Group::Connection, CONNECTION),
    command(
        Id::ClientTracking,
        "tracking",
        -3,
        "6.0.0",
        "Switches messages about changed keys off; they cannot be switched on.",
    )
    .flags(NOSCRIPT | LOADING | STALE)
    .in_group(Group::Connection, CONNECTION),
    command(
        Id::ClientTrackinginfo,
        "trackinginfo",
        2,
        "6.2.0",
        "Tells that messages about changed keys are off.",
    )
    .flags(NOSCRIPT | LOADING | STALE)
    .in_group(Group::Connection, CONNECTION),
    command(
        Id::ClientUnblock,
        "unblock",
        -3,
        "5.0.0",
        "Wakes a connection that waits in a command; no command waits.",
    )
    .flags(ADMIN | NOSCRIPT | LOADING | STALE)
    .in_group(Group::Connection, CONNECTION),
    command(Id::ClientUnpause, "unpause", 2, "6.2.0", "Ends a pause of all clients.")
        .flags(ADMIN | NOSCRIPT | LOADING | STALE)
        .in_group(Group::Connection, CONNECTION),
];
