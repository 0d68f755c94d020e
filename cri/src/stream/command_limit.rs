//! Limit of the commands of all clients, and of the clients that are attached to containers. Each of them has up to
//! three pipes, which are descriptors of this process.

use std::sync::LazyLock;

use coracle_connections::Share;

use crate::container::Container;
use crate::error::Error;
use crate::namespace_limit::{NamespaceLimit, NamespacePermit};
use crate::tables::Tables;

/// The commands and attached clients. The pods of one namespace leave permits for other namespaces.
static COMMANDS: LazyLock<NamespaceLimit> = LazyLock::new(|| NamespaceLimit::new(Share::Commands.count()));

/// A permit for a command in a container, or for a client of its first process. Dropping it releases the permit.
pub(super) fn take(tables: &Tables, container: &Container) -> Result<NamespacePermit, Error> {
    let sandbox = tables.sandbox(&container.record.sandbox_id)?;
    take_of(&COMMANDS, sandbox.namespace())
}

fn take_of(limit: &NamespaceLimit, namespace: &str) -> Result<NamespacePermit, Error> {
    limit.take(namespace).ok_or(Error::CommandLimit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_above_the_limit_are_refused() {
        let limit = NamespaceLimit::new(4);
        let held: Vec<_> = std::iter::from_fn(|| take_of(&limit, "a").ok()).collect();
        assert_eq!(held.len(), 3);
        assert!(matches!(take_of(&limit, "a"), Err(Error::CommandLimit)));
        drop(held);
        assert!(take_of(&limit, "a").is_ok());
    }
}
