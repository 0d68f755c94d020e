//! Makes the watch cache current for a request, if several servers share the store.
//!
//! A server's own commits are in its cache when they are acknowledged; commits of other servers arrive later. A request
//! therefore first waits until the cache contains all commits that were acknowledged before. A read with
//! `resourceVersion=0` accepts any age. While the store does not respond, reads use the cache without waiting, and
//! writes fail at their commit.

use std::time::Duration;

use coracle_store::{Health, Store};

use crate::{
    authn::User,
    cache::Cache,
    error::{ApiError, Result},
    request::parse_revision,
};

/// Maximum duration of the query for the store's newest revision.
const REVISION_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum wait until the cache contains that revision. Source: `blockTimeout` of
/// `apiserver/pkg/storage/cacher/watch_cache.go`.
const CACHE_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum time that service account tokens and bootstrap tokens are accepted while the store does not respond.
const MAX_STALE_CREDENTIAL: Duration = Duration::from_secs(15 * 60);

/// Waits until the cache is current enough for a request with this `resourceVersion`.
pub(crate) async fn wait(store: &dyn Store, cache: &Cache, verb: &str, resource_version: &str) -> Result<()> {
    if !store.is_shared() || is_any_age(verb, resource_version)? {
        return Ok(());
    }
    if let Some(asked) = parse_revision(resource_version)?
        && asked <= cache.revision()
        && is_read(verb)
    {
        return Ok(());
    }
    if matches!(store.health(), Health::Failed(_)) {
        return Ok(());
    }
    let newest = tokio::time::timeout(REVISION_TIMEOUT, store.revision()).await;
    let Ok(Ok(newest)) = newest else {
        tracing::debug!(
            ?newest,
            "cannot read the newest revision; the request uses the cache without waiting"
        );
        return Ok(());
    };
    // A cache that does not reach the revision in time has lost its watch; the request uses it without waiting longer.
    let _ = tokio::time::timeout(CACHE_TIMEOUT, cache.reach(newest)).await;
    Ok(())
}

/// Refuses a user whose credential is a stored object, if the store has not responded for a long time: another server
/// may have deleted the credential.
pub(crate) fn check_credential(store: &dyn Store, user: &User) -> Result<()> {
    if is_outdated(user, store.unreachable_for()) {
        return Err(ApiError::unavailable("cannot verify the token: the store does not answer"));
    }
    Ok(())
}

fn is_outdated(user: &User, unreachable_for: Option<Duration>) -> bool {
    let is_object =
        ["system:serviceaccount:", "system:bootstrap:"].iter().any(|kind| user.name.starts_with(kind));
    is_object && unreachable_for.is_some_and(|time| time > MAX_STALE_CREDENTIAL)
}

fn is_read(verb: &str) -> bool {
    matches!(verb, "get" | "list" | "watch")
}

fn is_any_age(verb: &str, resource_version: &str) -> Result<bool> {
    Ok(is_read(verb) && parse_revision(resource_version)? == Some(0))
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

    #[test]
    fn only_tokens_are_refused_and_only_without_the_store_for_long() {
        let user = |name: &str| User { name: name.to_owned(), ..User::default() };
        let (short, long) = (MAX_STALE_CREDENTIAL / 2, MAX_STALE_CREDENTIAL * 2);
        for (name, time, expected) in [
            ("system:serviceaccount:n:a", Some(long), true),
            ("system:serviceaccount:n:a", Some(short), false),
            ("system:serviceaccount:n:a", None, false),
            ("system:bootstrap:abcdef", Some(long), true),
            ("system:node:a", Some(long), false),
            ("kubernetes-admin", Some(long), false),
        ] {
            assert_eq!(is_outdated(&user(name), time), expected, "{name} {time:?}");
        }
    }
}
