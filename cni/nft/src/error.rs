//! Errors of nftables tables that a component of the node owns and repairs.

use std::io;

/// The reason why a table does not have the desired content.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
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
    /// Another process changed the table while it was replaced.
    #[error("another process changed the nftables table {table} at the same time")]
    Changed {
        /// Name of the table.
        table: String,
    },
}
