//! Shims for tests.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use futures::channel::mpsc;

use super::link::Link;
use super::process::Process;
use super::socket::Socket;
use super::{Inner, Shim, Timeouts};

impl Shim {
    /// A connection without a server. Its process is the test.
    pub(crate) fn unresponsive() -> Self {
        let (socket, _closed) = Socket::pair().unwrap();
        let (sender, receiver) = mpsc::unbounded();
        let link = Link::open(socket, sender);
        let process = Process::open(std::process::id().cast_signed()).unwrap();
        let inner = Inner { dir: PathBuf::new(), link, process, events: Mutex::new(Some(receiver)) };
        Self { inner: Arc::new(inner), timeouts: Timeouts::default() }
    }
}
