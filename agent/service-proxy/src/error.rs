//! Errors of the service proxy.

use std::io;

/// Why the table does not match the services.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket could not be opened.
    #[error("cannot open an nftables socket")]
    Socket(#[source] io::Error),
    /// The kernel rejected a transaction.
    #[error("cannot change the nftables table {table}")]
    Commit {
        /// Name of the table.
        table: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}
