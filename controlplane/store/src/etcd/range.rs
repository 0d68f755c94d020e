//! Reads: one entry, pages of entries at one revision, the newest revision.

use super::{
    Keys, Shared,
    api::{CompactionRequest, KeyValue, RangeRequest},
    revision_of, signed, unsigned,
};
use crate::{Entry, Error, Page, Range};

/// Entries in one response of etcd. A response of more entries could take gigabytes.
const PAGE: usize = 500;
/// Attempts of a list whose revision is compacted meanwhile.
const ATTEMPTS: usize = 3;

// === impl Shared ===

impl Shared {
    pub(super) async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        let request = RangeRequest { key: self.keys.outer(key), ..RangeRequest::default() };
        let response = self.connection.range(request).await?;
        response.kvs.into_iter().next().map(|kv| self.entry(key, kv)).transpose()
    }

    pub(super) async fn revision(&self) -> Result<u64, Error> {
        // A linearizable read of nothing.
        let key = self.keys.prefix.clone().into_bytes();
        let request = RangeRequest { key, count_only: true, ..RangeRequest::default() };
        let response = self.connection.range(request).await?;
        let revision = revision_of(response.header.as_ref());
        self.connection.expect_progress(revision);
        Ok(revision)
    }

    pub(super) async fn list(&self, range: &Range) -> Result<Page, Error> {
        let mut attempts = ATTEMPTS;
        loop {
            match self.list_once(range).await {
                Err(Error::Compacted { .. }) if attempts > 1 => attempts -= 1,
                Ok(page) => {
                    self.connection.expect_progress(page.revision);
                    return Ok(page);
                }
                outcome => return outcome,
            }
        }
    }

    async fn list_once(&self, range: &Range) -> Result<Page, Error> {
        let start = if range.start > range.prefix { &range.start } else { &range.prefix };
        let limit = if range.limit == 0 { usize::MAX } else { range.limit };
        let end = Keys::end_of(self.keys.outer(&range.prefix));
        let (mut name, mut revision, mut entries) = (self.keys.outer(start), 0, Vec::new());
        loop {
            let count = PAGE.min(limit - entries.len());
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
            name = response.kvs.last().map_or_else(Vec::new, |kv| kv.key.clone());
            name.push(0);
            for kv in response.kvs {
                let Some(key) = self.keys.inner(&kv.key).map(str::to_owned) else { continue };
                entries.push(self.entry(&key, kv)?);
            }
            if !response.more || entries.len() >= limit {
                return Ok(Page { entries, revision, more: response.more });
            }
        }
    }

    fn entry(&self, key: &str, kv: KeyValue) -> Result<Entry, Error> {
        let (created, modified) = (unsigned(kv.create_revision), unsigned(kv.mod_revision));
        Ok(Entry { key: key.into(), value: self.opened(key, kv.value)?, created, modified })
    }

    /// Checks that a watch can start after a revision.
    pub(super) async fn check_history(&self, prefix: &str, after: u64) -> Result<(), Error> {
        let newest = self.revision().await?;
        if after > newest {
            return Err(Error::Future { asked: after, newest });
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
            return Err(Error::Future { asked: revision, newest });
        }
        match self.connection.compact(CompactionRequest { revision: signed(revision) }).await {
            // Another server compacted up to this revision or a later one.
            Err(Error::Compacted { .. }) => Ok(()),
            outcome => outcome.map(|_| ()),
        }
    }
}
