//! Reads: one entry, pages of entries at one revision, the newest revision.

use std::{sync::Arc, time::Duration};

use super::{
    Keys, Shared,
    api::{CompactionRequest, KeyValue, RangeRequest},
    revision_of, signed, unsigned,
};
use crate::{Entry, Error, Page, Range, ReadablePage, Unreadable, codec::FailedServices};

/// The entries that a list has read.
#[derive(Default)]
pub(super) struct Found {
    /// The entries that can be decrypted.
    pub(super) entries: Vec<Entry>,
    /// The other entries.
    pub(super) unreadable: Vec<Unreadable>,
    failed_services: FailedServices,
}

/// The key that a check reads, as upstream. No object has this key, because it has no `/`.
const HEALTH: &str = "health";
/// Number of entries in the first response of etcd for a list, and the maximum number in a later response.
const FIRST_PAGE_ENTRIES: usize = 64;
const MAX_PAGE_ENTRIES: usize = 500;
/// Size of the values above which the next response has fewer entries, in bytes. Hundreds of large objects would take
/// longer than the timeout of a request.
const LARGE_PAGE_BYTES: usize = 16 << 20;
/// Maximum attempts to list. A new attempt is needed if the revision of the list is compacted during the list.
const ATTEMPTS: usize = 3;

// === impl Shared ===

impl Shared {
    pub(super) async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        let request = RangeRequest { key: self.keys.outer(key), ..RangeRequest::default() };
        let response = self.connection.range(request).await?;
        let kv = response.kvs.into_iter().next();
        kv.map(|kv| self.entry(&mut FailedServices::default(), key, kv)).transpose()
    }

    pub(super) async fn revision_of(&self, key: &str) -> Result<Option<u64>, Error> {
        let request = RangeRequest { key: self.keys.outer(key), keys_only: true, ..RangeRequest::default() };
        let response = self.connection.range(request).await?;
        Ok(response.kvs.first().map(|kv| unsigned(kv.mod_revision)))
    }

    /// Whether the value of a key is encrypted with the current key, or need not be encrypted.
    pub(super) async fn is_current(&self, key: &str) -> Result<bool, Error> {
        if !self.codec.may_be_outdated(key) {
            return Ok(true);
        }
        let request = RangeRequest { key: self.keys.outer(key), ..RangeRequest::default() };
        let response = self.connection.range(request).await?;
        Ok(response.kvs.first().is_none_or(|kv| self.codec.is_current(key, &kv.value)))
    }

    pub(super) async fn revision(&self) -> Result<u64, Error> {
        // A linearizable read of the count, without entries.
        let key = self.keys.prefix.clone().into_bytes();
        let request = RangeRequest { key, count_only: true, ..RangeRequest::default() };
        let confirmed = self.connection.confirmed();
        let response = self.connection.range(request).await?;
        let revision = revision_of(response.header.as_ref());
        self.connection.check_revision(confirmed, revision)?;
        self.connection.expect_progress(revision);
        Ok(revision)
    }

    /// Checks whether etcd responds within a time. Source: `etcd3ProberMonitor` of
    /// `apiserver/pkg/storage/storagebackend/factory/etcd3.go`.
    pub(super) async fn probe(&self, timeout: Duration) -> Result<(), Error> {
        let request = RangeRequest { key: self.keys.outer(HEALTH), ..RangeRequest::default() };
        match tokio::time::timeout(timeout, self.connection.range(request)).await {
            Ok(outcome) => outcome.map(|_| ()),
            Err(_elapsed) => Err(Error::Unavailable { detail: format!("no response within {timeout:?}") }),
        }
    }

    pub(super) async fn list(&self, range: &Range) -> Result<Page, Error> {
        self.list_readable(range).await?.complete()
    }

    /// The entries of a range that can be decrypted, and the other entries.
    pub(super) async fn list_readable(&self, range: &Range) -> Result<ReadablePage, Error> {
        let mut attempts = ATTEMPTS;
        loop {
            let confirmed = self.connection.confirmed();
            match self.list_once(range).await {
                Err(Error::Compacted { .. }) if attempts > 1 => attempts -= 1,
                Ok(found) => {
                    // A cache that loads the list must not fall back to an older state.
                    self.connection.check_revision(confirmed, found.page.revision)?;
                    self.connection.expect_progress(found.page.revision);
                    return Ok(found);
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn list_once(&self, range: &Range) -> Result<ReadablePage, Error> {
        let start = if range.start > range.prefix { &range.start } else { &range.prefix };
        let limit = if range.limit == 0 { usize::MAX } else { range.limit };
        let end = Keys::end_of(self.keys.outer(&range.prefix));
        let (mut name, mut revision) = (self.keys.outer(start), 0);
        let mut found = Found::default();
        let mut size = FIRST_PAGE_ENTRIES;
        loop {
            let count = size.min(limit - found.entries.len());
            let response = self.connection.range(RangeRequest {
                key: name,
                range_end: end.clone(),
                limit: i64::try_from(count).unwrap_or(i64::MAX),
                revision: signed(revision),
                ..RangeRequest::default()
            });
            let response = response.await?;
            if revision == 0 {
                revision = revision_of(response.header.as_ref());
            }
            size = next_size(size, response.kvs.iter().map(|kv| kv.value.len()).sum());
            name = response.kvs.last().map_or_else(Vec::new, |kv| kv.key.clone());
            name.push(0);
            self.read(response.kvs, &mut found);
            if !response.more || found.entries.len() >= limit {
                let Found { entries, unreadable, .. } = found;
                return Ok(ReadablePage {
                    page: Page { entries, revision, more: response.more },
                    unreadable,
                });
            }
        }
    }

    /// Decrypts the entries and adds them to `found`.
    pub(super) fn read(&self, kvs: Vec<KeyValue>, found: &mut Found) {
        for kv in kvs {
            let Some(key) = self.keys.inner(&kv.key).map(Arc::<str>::from) else { continue };
            let modified = unsigned(kv.mod_revision);
            match self.entry(&mut found.failed_services, &key, kv) {
                Ok(entry) => found.entries.push(entry),
                Err(error) => found.unreadable.push(Unreadable { key, modified, error }),
            }
        }
    }

    fn entry(&self, failed: &mut FailedServices, key: &str, kv: KeyValue) -> Result<Entry, Error> {
        let (created, modified) = (unsigned(kv.create_revision), unsigned(kv.mod_revision));
        Ok(Entry { key: key.into(), value: self.opened(failed, key, kv.value)?, created, modified })
    }

    /// Checks that a watch can start after a revision.
    pub(super) async fn check_history(&self, prefix: &str, after: u64) -> Result<(), Error> {
        let newest = self.revision().await?;
        if after > newest {
            return Err(Error::Future { requested: after, newest });
        }
        let key = self.keys.outer(prefix);
        let revision = signed(after.max(1));
        let request = RangeRequest { key, revision, count_only: true, ..RangeRequest::default() };
        match self.connection.range(request).await {
            Err(Error::Compacted { .. }) => Err(Error::Compacted { oldest: newest }),
            outcome => outcome.map(|_| ()),
        }
    }

    pub(super) async fn compact(&self, revision: u64) -> Result<(), Error> {
        let newest = self.revision().await?;
        if revision > newest {
            return Err(Error::Future { requested: revision, newest });
        }
        match self.connection.compact(CompactionRequest { revision: signed(revision) }).await {
            // Another server compacted up to this revision or a later revision.
            Err(Error::Compacted { .. }) => Ok(()),
            outcome => outcome.map(|_| ()),
        }
    }
}

/// The number of entries in the next response. `bytes` is the size of the values in the last response.
fn next_size(size: usize, bytes: usize) -> usize {
    if bytes > LARGE_PAGE_BYTES { (size / 2).max(1) } else { (size * 2).min(MAX_PAGE_ENTRIES) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_grow_to_the_maximum_and_shrink_after_large_values() {
        assert_eq!(next_size(FIRST_PAGE_ENTRIES, 0), 2 * FIRST_PAGE_ENTRIES);
        assert_eq!(next_size(MAX_PAGE_ENTRIES, LARGE_PAGE_BYTES), MAX_PAGE_ENTRIES);
        assert_eq!(next_size(MAX_PAGE_ENTRIES, LARGE_PAGE_BYTES + 1), MAX_PAGE_ENTRIES / 2);
        assert_eq!(next_size(1, usize::MAX), 1);
    }
}
