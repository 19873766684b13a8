//! Starts a server, and ends it.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use redis_formats::acl::Users as UserTable;
use units::files;

use crate::config::{Config, Ignored};
use crate::error::Error;
use crate::keyspace::Keyspace;
use crate::net::event_loop::{self, Job};
use crate::net::inbox::Inbox;
use crate::net::listen;
use crate::server::{Handle, Server};
use crate::users::Users;

/// Everything that a server is started with.
#[derive(Debug, Default)]
pub struct Setup {
    /// The configuration.
    pub config: Config,
    /// Lines of the file that are no parameters.
    pub ignored: Ignored,
    /// Path of the file, for INFO.
    pub file: String,
}

/// A server that runs.
#[derive(Debug)]
pub struct Running {
    server: Arc<Server>,
    threads: Vec<JoinHandle<Result<(), Error>>>,
    addresses: Vec<String>,
}

impl Setup {
    /// Opens the sockets and starts the threads.
    ///
    /// # Errors
    ///
    /// A parameter is impossible, or the system refuses a socket or a thread.
    pub fn start<K: Keyspace>(self, store: Arc<K>) -> Result<Running, Error> {
        let users = self.users()?;
        let listeners = listen::open(&self.config)?;
        let addresses = listeners.iter().map(|listener| listener.address.clone()).collect();
        let count = self.config.number("io-threads").max(1);
        let system = |attempt| move |cause: io::Error| Error::System { attempt, cause };
        let handles: Result<Box<[Handle]>, _> =
            (0..count).map(|_| Inbox::new().map(Handle::new)).collect();
        let handles = handles?;
        let server = Arc::new(Server::new(self.config, users, handles, self.file));
        store.configured(&server);
        let mut threads = Vec::new();
        for index in 0..server.threads.len() {
            server.threads[index].inbox.push(Job::Maintain);
            let (shared, store) = (server.clone(), store.clone());
            let run = move || {
                let result = event_loop::run(shared.clone(), store, index);
                if let Err(error) = &result {
                    shared.fail(error.to_string());
                }
                result
            };
            let thread = thread::Builder::new().name(format!("granary-kv-{index}")).spawn(run);
            match thread {
                Ok(thread) => threads.push(thread),
                Err(cause) => {
                    server.end();
                    return Err(system("starting a thread")(cause));
                }
            }
        }
        server.threads[0].inbox.push(Job::Load);
        for listener in listeners {
            server.threads[0].inbox.push(Job::Accept(listener));
        }
        Ok(Running { server, threads, addresses })
    }

    /// The users of the file, of the lines `user` and of `requirepass`.
    fn users(&self) -> Result<Users, Error> {
        let users = Users::default();
        let file = self.config.get("aclfile");
        if !file.is_empty() && !self.ignored.users.is_empty() {
            let text = "the lines `user` and aclfile exclude each other".to_owned();
            return Err(Error::Users(text));
        }
        if !file.is_empty() {
            let text = files::read(file.as_ref());
            let text = text.map_err(|e| Error::Users(format!("{file}: {e}")))?;
            let read = UserTable::parse(&text).map_err(|e| Error::Users(format!("{file}: {e}")))?;
            users.change(|table| *table = read);
        }
        for line in &self.ignored.users {
            let Some((name, rules)) = line.split_first() else {
                return Err(Error::Users("a line `user` has no name".to_owned()));
            };
            let result = users.change(|table| table.set(name, rules));
            result.map_err(|error| Error::Users(error.to_string()))?;
        }
        let password = self.config.get("requirepass");
        if !password.is_empty() {
            users.require_password(&password);
        }
        Ok(users)
    }
}

impl Running {
    /// The state that all threads share.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// The addresses at which the server listens: `HOST:PORT`, and paths of Unix sockets.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Waits for the end of all threads: after SHUTDOWN, or [`Stop::stop`].
    ///
    /// # Errors
    ///
    /// The data could not be loaded or saved, or a thread has failed.
    pub fn wait(self) -> Result<(), Error> {
        for thread in self.threads {
            if thread.join().is_err() {
                self.server.fail("a thread has panicked; report this error".to_owned());
            }
        }
        match self.server.failure() {
            Some(text) => Err(Error::Ended(text)),
            None => Ok(()),
        }
    }

    /// A value that ends the server, for another thread.
    pub fn stop(&self) -> Stop {
        Stop(self.server.clone())
    }
}

/// Ends a server.
#[derive(Clone, Debug)]
pub struct Stop(Arc<Server>);

impl Stop {
    /// Saves if the configuration has points for saving, and ends the server. The server goes on
    /// if the save fails.
    pub fn stop(&self) {
        self.0.ask_to_end();
    }
}
