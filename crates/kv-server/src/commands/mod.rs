//! The commands, one file for each subject.
//!
//! Commands on sessions and on the server are here. All others are those on data, which
//! [`Keyspace::execute`] executes.

mod acl;
mod client;
mod cluster;
mod config;
mod connection;
mod debug;
mod help;
mod info;
mod info_sections;
mod latency;
mod memory;
mod pubsub;
mod server;
mod transaction;

pub use debug::unknown as unknown_debug;
use redis_formats::command::{self, Id};

use crate::client::{Client, flag};
use crate::context::Context;
use crate::keyspace::Keyspace;

/// Executes the command of `cx`.
pub(crate) async fn execute<K: Keyspace>(cx: &mut Context<'_, K>) {
    match cx.command.id {
        Id::Ping => connection::ping(cx),
        Id::Echo => connection::echo(cx),
        Id::Hello => connection::hello(cx),
        Id::Auth => connection::auth(cx),
        Id::Reset => connection::reset(cx),
        Id::Quit => connection::quit(cx),
        Id::Select => connection::select(cx),
        Id::Client | Id::ClientHelp => help::reply(cx),
        Id::ClientCaching => client::caching(cx),
        Id::ClientGetredir => client::redirection(cx),
        Id::ClientGetname => client::get_name(cx),
        Id::ClientId => client::id(cx),
        Id::ClientInfo => client::info(cx),
        Id::ClientKill => client::kill(cx),
        Id::ClientList => client::list(cx),
        Id::ClientNoEvict => client::no_evict(cx),
        Id::ClientNoTouch => client::no_touch(cx),
        Id::ClientPause => client::pause(cx),
        Id::ClientReply => client::reply(cx),
        Id::ClientSetinfo => client::set_info(cx),
        Id::ClientSetname => client::set_name(cx),
        Id::ClientTracking => client::tracking(cx),
        Id::ClientTrackinginfo => client::tracking_info(cx),
        Id::ClientUnblock => client::unblock(cx),
        Id::ClientUnpause => client::unpause(cx),
        Id::Subscribe | Id::Psubscribe | Id::Ssubscribe => pubsub::subscribe(cx),
        Id::Unsubscribe | Id::Punsubscribe | Id::Sunsubscribe => pubsub::unsubscribe(cx),
        Id::Publish | Id::Spublish => pubsub::publish(cx),
        Id::PubsubChannels | Id::PubsubShardchannels => pubsub::channels(cx),
        Id::PubsubNumpat => pubsub::patterns(cx),
        Id::PubsubNumsub | Id::PubsubShardnumsub => pubsub::subscribers(cx),
        Id::Pubsub | Id::PubsubHelp => help::reply(cx),
        Id::Multi => transaction::multi(cx),
        Id::Discard => transaction::discard(cx),
        Id::Info => info::info(cx),
        Id::ConfigGet => config::get(cx),
        Id::ConfigSet => config::set(cx),
        Id::ConfigResetstat => config::reset_statistics(cx),
        Id::Config | Id::ConfigHelp => help::reply(cx),
        Id::Command
        | Id::CommandCount
        | Id::CommandDocs
        | Id::CommandGetkeys
        | Id::CommandGetkeysandflags
        | Id::CommandHelp
        | Id::CommandInfo
        | Id::CommandList => {
            let (command, args) = (cx.command, cx.args);
            command::reply(command, &args, &mut cx.reply());
        }
        Id::Time => server::time(cx),
        Id::Lolwut => server::lolwut(cx),
        Id::Replicaof | Id::Slaveof => server::replica_of(cx),
        Id::ModuleList => cx.reply().array(0),
        Id::Module | Id::ModuleHelp => help::reply(cx),
        Id::Role => server::role(cx),
        Id::Wait => server::wait(cx),
        Id::Monitor => server::monitor(cx),
        Id::Shutdown => server::shutdown(cx).await,
        Id::FunctionFlush => server::function_flush(cx),
        Id::FunctionList => server::function_list(cx),
        Id::FunctionStats => server::function_stats(cx),
        Id::Function | Id::FunctionHelp => help::reply(cx),
        Id::SlowlogGet => latency::slowlog_get(cx),
        Id::SlowlogLen => latency::slowlog_len(cx),
        Id::SlowlogReset => latency::slowlog_reset(cx),
        Id::Slowlog | Id::SlowlogHelp => help::reply(cx),
        Id::LatencyHistogram => latency::histogram(cx),
        Id::LatencyHistory => latency::history(cx),
        Id::LatencyLatest => latency::latest(cx),
        Id::LatencyReset => latency::reset(cx),
        Id::LatencyDoctor => latency::doctor(cx),
        Id::LatencyGraph => latency::graph(cx),
        Id::Latency | Id::LatencyHelp => help::reply(cx),
        Id::MemoryDoctor => memory::doctor(cx),
        Id::MemoryMallocStats => memory::allocator(cx),
        Id::MemoryStats => memory::stats(cx),
        Id::Memory | Id::MemoryHelp => help::reply(cx),
        Id::AclCat => acl::cat(cx),
        Id::AclDeluser => acl::delete(cx),
        Id::AclDryrun => acl::dry_run(cx),
        Id::AclGenpass => acl::generate(cx),
        Id::AclGetuser => acl::get(cx),
        Id::AclList => acl::list(cx),
        Id::AclLoad => acl::load(cx),
        Id::AclLog => acl::log(cx),
        Id::AclSave => acl::save(cx),
        Id::AclSetuser => acl::set(cx),
        Id::AclUsers => acl::users(cx),
        Id::AclWhoami => acl::who_am_i(cx),
        Id::Acl | Id::AclHelp => help::reply(cx),
        Id::Cluster
        | Id::ClusterHelp
        | Id::ClusterInfo
        | Id::ClusterKeyslot
        | Id::ClusterLinks
        | Id::ClusterMyid
        | Id::ClusterNodes
        | Id::ClusterShards
        | Id::ClusterSlots
        | Id::ClusterCountkeysinslot
        | Id::ClusterGetkeysinslot => cluster::refuse(cx),
        Id::Debug if debug::is_own(cx) => debug::execute(cx).await,
        Id::ObjectHelp => help::reply(cx),
        _ => K::execute(cx).await,
    }
}

/// Returns whether the peer is on this host.
pub(crate) fn is_local(client: &Client) -> bool {
    let is_loopback = || {
        let address: Option<std::net::SocketAddr> = client.address.parse().ok();
        address.is_some_and(|own| own.ip().to_canonical().is_loopback())
    };
    client.has(flag::UNIX) || is_loopback()
}

/// Reads an integer argument.
fn integer<K: Keyspace>(cx: &Context<'_, K>, index: usize) -> Option<i64> {
    redis_formats::number::parse_i64(cx.args.get(index))
}
