//! Makes the watch cache current for a request, if several servers share the store.
//!
//! A server's own commits are in its cache when they are acknowledged; commits of other servers arrive later. A request
//! therefore first waits until the cache contains all commits that were acknowledged before. A read with
//! `resourceVersion=0` accepts any age. If the cache does not become current in time, a read without `resourceVersion`
//! fails, as upstream's reads from etcd. Watches continue, and writes fail at their commit.

use std::time::Duration;

use coracle_kinds::Resource;
use coracle_store::{Health, Store};

use crate::{
    authn::User,
    cache::Cache,
    error::{ApiError, Result},
    in_flight::is_long_running,
    request::{RequestInfo, parse_revision},
    waits,
};

/// Maximum duration of the query for the store's newest revision.
const REVISION_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum wait until the cache contains that revision. Source: `blockTimeout` of
/// `apiserver/pkg/storage/cacher/watch_cache.go`.
const CACHE_TIMEOUT: Duration = Duration::from_secs(3);

/// The message of a read that fails because the cache may be too old.
const NOT_CURRENT: &str = "etcd did not answer in time, so the server may lack newer objects; \
                           resourceVersion=0 reads objects of any age";
/// Seconds after which a client may send such a read again.
const RETRY_SECONDS: u64 = 1;

/// Maximum time that service account tokens and bootstrap tokens are accepted while the store does not respond.
const MAX_STALE_CREDENTIAL: Duration = Duration::from_secs(15 * 60);

/// Waits until the cache is current enough for a request. A request that waits for a long time gives its seats back.
/// Otherwise, while etcd does not respond, the reads that wait for etcd would take the seats of all other reads.
///
/// # Errors
/// `Timeout` if the cache does not become current in time, and the request is a read without `resourceVersion`.
pub(crate) async fn wait(
    store: &dyn Store,
    cache: &Cache,
    info: &RequestInfo,
    kind: &Resource,
) -> Result<()> {
    let revision = info.query.get("resourceVersion");
    if !store.is_shared() || is_any_age(info.verb, revision)? {
        return Ok(());
    }
    let asked = parse_revision(revision)?;
    if asked.is_some_and(|asked| asked <= cache.revision()) && is_read(info.verb) {
        return Ok(());
    }
    let must_be_current = asked.is_none() && is_consistent_read(info, kind);
    if !must_be_current && matches!(store.health(), Health::Failed(_)) {
        return Ok(());
    }
    let is_current = waits::without_seats(becomes_current(store, cache)).await;
    match is_current || !must_be_current {
        true => Ok(()),
        false => Err(ApiError::timeout(NOT_CURRENT, RETRY_SECONDS)),
    }
}

/// Waits until the cache has all commits that were acknowledged before this call. Returns false after a timeout.
async fn becomes_current(store: &dyn Store, cache: &Cache) -> bool {
    match tokio::time::timeout(REVISION_TIMEOUT, store.revision()).await {
        // A cache that does not reach the revision in time has lost its watch.
        Ok(Ok(newest)) => {
            matches!(tokio::time::timeout(CACHE_TIMEOUT, cache.reach(newest)).await, Ok(Ok(())))
        }
        failed => {
            tracing::debug!(?failed, "cannot read the newest revision");
            false
        }
    }
}

/// Refuses a user whose credential is a stored object, if the store has not responded for a long time. Another server
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

/// Whether a request without `resourceVersion` must see all acknowledged commits. Logs and streams do not count,
/// because they come from nodes.
fn is_consistent_read(info: &RequestInfo, kind: &Resource) -> bool {
    matches!(info.verb, "get" | "list") && kind.is_stored() && !is_long_running(info)
}

fn is_any_age(verb: &str, resource_version: &str) -> Result<bool> {
    Ok(is_read(verb) && parse_revision(resource_version)? == Some(0))
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;
    use http::{Method, Uri};

    use super::*;

    #[test]
    fn logs_streams_and_watches_need_no_current_cache() {
        let kind = by_kind("v1", "Pod").unwrap();
        let is_consistent = |path: &str| {
            let uri: Uri = format!("/api/v1/namespaces/n/pods{path}").parse().unwrap();
            is_consistent_read(&RequestInfo::parse(&Method::GET, &uri), kind)
        };
        assert!(is_consistent("") && is_consistent("/p") && is_consistent("/p/status"));
        assert!(!is_consistent("/p/log") && !is_consistent("?watch=1") && !is_consistent("/p/proxy/a"));
    }

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
