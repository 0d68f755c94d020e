//! How current the watch cache must be for a request, if several servers share the store.
//!
//! A server's own commits are in its cache when they are acknowledged; commits of other servers arrive later. So a
//! request first waits until its cache has all commits that were acknowledged before. A read of `resourceVersion=0` may
//! be of any age. While the store does not answer, reads are served from the cache as it is, and writes fail at their
//! commit.

use std::time::Duration;

use coracle_store::Health;

use crate::{error::Result, server::State, verb::list};

/// Maximum time that the store has to tell its newest revision.
const REVISION: Duration = Duration::from_secs(2);
/// Maximum time until the cache has a revision. Source: `blockTimeout` in `apiserver/pkg/storage/cacher/watch_cache.go`.
const REACH: Duration = Duration::from_secs(3);

/// Waits until the cache is current enough for a request with this `resourceVersion`.
pub(crate) async fn wait(state: &State, verb: &str, resource_version: &str) -> Result<()> {
    if !state.store.is_shared() || is_any_age(verb, resource_version)? {
        return Ok(());
    }
    if let Some(asked) = list::revision(resource_version)?
        && asked <= state.cache.revision()
        && is_read(verb)
    {
        return Ok(());
    }
    if matches!(state.store.health(), Health::Failed(_)) {
        return Ok(());
    }
    let newest = tokio::time::timeout(REVISION, state.store.revision()).await;
    let Ok(Ok(newest)) = newest else {
        tracing::debug!(?newest, "cannot read the newest revision: the request uses the cache as it is");
        return Ok(());
    };
    // A cache that does not follow in time has lost its watch; the request uses it as it is.
    let _ = tokio::time::timeout(REACH, state.cache.reach(newest)).await;
    Ok(())
}

fn is_read(verb: &str) -> bool {
    matches!(verb, "get" | "list" | "watch")
}

fn is_any_age(verb: &str, resource_version: &str) -> Result<bool> {
    Ok(is_read(verb) && list::revision(resource_version)? == Some(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reads_of_revision_zero_may_be_of_any_age() {
        for (verb, revision, any) in
            [("list", "0", true), ("list", "", false), ("get", "7", false), ("update", "0", false)]
        {
            assert_eq!(is_any_age(verb, revision).unwrap(), any, "{verb} {revision}");
        }
    }
}
